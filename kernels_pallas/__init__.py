"""Recurrent ops of hybrid language models, on arrays alone; each op is a package."""

from kernels_pallas.blocks import Blocks as Blocks
from kernels_pallas.blocks import cut_rows as cut_rows
