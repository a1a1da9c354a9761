"""Checkpoints as hubs keep them: a folder with config.json and safetensors."""

from mambacache_jax.models.checkpoint.read import Checkpoint as Checkpoint
from mambacache_jax.models.checkpoint.read import load_params as load_params
from mambacache_jax.models.checkpoint.rules import Rules as Rules
from mambacache_jax.models.checkpoint.settings import Settings as Settings
from mambacache_jax.models.checkpoint.settings import read_config as read_config
