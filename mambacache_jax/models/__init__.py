"""Language models in Flax NNX, and what they ask of the cache."""

from mambacache_jax.models.chat import ChatTemplate as ChatTemplate
from mambacache_jax.models.context import Context as Context
from mambacache_jax.models.hub_tokenizer import HubTokenizer as HubTokenizer
from mambacache_jax.models.load import abstract as abstract
from mambacache_jax.models.load import load as load
from mambacache_jax.models.model import Model as Model
from mambacache_jax.models.plain import PlainContext as PlainContext
from mambacache_jax.models.tokenizer import ByteTokenizer as ByteTokenizer
from mambacache_jax.models.tokenizer import TextStream as TextStream
from mambacache_jax.models.tokenizer import Tokenizer as Tokenizer
