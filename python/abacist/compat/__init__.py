"""Attention under the names, argument orders and conventions of other libraries.

`sdpa` is torch.nn.functional.scaled_dot_product_attention; `flash_attn` is a module of flash-attn 2's
public functions; `transformers.register` makes Abacist an attention implementation of Hugging Face's
models. What cannot be done is refused with the reason; nothing else runs in its place.
"""

from . import flash_attn, transformers
from ._sdpa import sdpa

__all__ = ["flash_attn", "sdpa", "transformers"]
