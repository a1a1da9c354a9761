"""The built-in model: a byte-level hybrid with every kind of layer, trained on Python's own sources."""

from mambacache_jax.models.tiny.network import TinyConfig as TinyConfig
from mambacache_jax.models.tiny.network import TinyLM as TinyLM
from mambacache_jax.models.tiny.weights import WEIGHTS_FILE as WEIGHTS_FILE
from mambacache_jax.models.tiny.weights import abstract as abstract
from mambacache_jax.models.tiny.weights import as_model as as_model
from mambacache_jax.models.tiny.weights import load as load
from mambacache_jax.models.tiny.weights import record as record
