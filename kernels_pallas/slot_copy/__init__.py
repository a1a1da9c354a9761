"""Whole slots of pools, copied and cleared in place."""

from kernels_pallas.slot_copy.api import slot_clear as slot_clear
from kernels_pallas.slot_copy.api import slot_copy as slot_copy
