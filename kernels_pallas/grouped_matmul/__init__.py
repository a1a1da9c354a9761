"""Matrix products of groups of rows, each with its group's matrix."""

from kernels_pallas.grouped_matmul.api import grouped_matmul as grouped_matmul
