"""The recurrence of Mamba-2, gated DeltaNet and KDA layers."""

from kernels_pallas.ssm_scan.api import ssm_scan as ssm_scan
