"""Layers that model families share, in Flax NNX; flat tokens in, flat tokens out."""

from mambacache_jax.models.layers.attention import Attend as Attend
from mambacache_jax.models.layers.attention import Attention as Attention
from mambacache_jax.models.layers.attention import FrozenAttention as FrozenAttention
from mambacache_jax.models.layers.block import Block as Block
from mambacache_jax.models.layers.gdn import GatedDeltaNet as GatedDeltaNet
from mambacache_jax.models.layers.kda import KimiDeltaAttention as KimiDeltaAttention
from mambacache_jax.models.layers.latent import LatentAttention as LatentAttention
from mambacache_jax.models.layers.linear import Embedding as Embedding
from mambacache_jax.models.layers.linear import Linear as Linear
from mambacache_jax.models.layers.mamba2 import Mamba2 as Mamba2
from mambacache_jax.models.layers.mlp import SquaredReLU as SquaredReLU
from mambacache_jax.models.layers.mlp import SwiGLU as SwiGLU
from mambacache_jax.models.layers.moe import MoE as MoE
from mambacache_jax.models.layers.moe import Router as Router
from mambacache_jax.models.layers.mtp import MTPBlock as MTPBlock
from mambacache_jax.models.layers.norm import GatedRMSNorm as GatedRMSNorm
from mambacache_jax.models.layers.norm import RMSNorm as RMSNorm
from mambacache_jax.models.layers.norm import l2_normalised as l2_normalised
from mambacache_jax.models.layers.parallel import Parallel as Parallel
from mambacache_jax.models.layers.rotary import rotate as rotate
