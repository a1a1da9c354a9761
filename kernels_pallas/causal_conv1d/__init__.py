"""The short causal convolution in front of the recurrence."""

from kernels_pallas.causal_conv1d.api import causal_conv1d as causal_conv1d
from kernels_pallas.causal_conv1d.api import causal_conv1d_step as causal_conv1d_step
