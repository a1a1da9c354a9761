"""What programs become on devices that are not here."""

from kernels_pallas.report.api import compile_report as compile_report
