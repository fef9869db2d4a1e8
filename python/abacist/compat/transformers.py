"""Abacist as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

import typing

from .._attention import attention
from ._names import ERRORS, renamed

__all__ = ["register"]

NAMES = {
    "q": "query", "k": "key", "v": "value", "mask": "attention_mask", "bias": "attention_mask",
    "scale": "scaling", "dropout_p": "dropout", "sinks": "s_aux",
}  # fmt: skip
# What some model passes beyond the common arguments and changes the result: never passed over.
REFUSED = {
    "head_mask": "weights of heads are never written",
    "output_attentions": "attention weights are never written",
    "sinks": "a sink for every query is not supported (s_aux, one for every head, is)",
    "block_indices": "blocks of keys chosen for every query are not supported",
}


def _floats(name: str, x: typing.Any, query: typing.Any) -> typing.Any:
    """An additive mask of a type that the library takes: float32 or that of query."""
    if x.dim() != 4:
        raise ValueError(f"{name}: has shape {tuple(x.shape)}, must be [b|1, h|1, s_q|1, s_k]")
    return x if x.dtype == query.dtype else x.float()


def _masks(attention_mask, position_bias, query, key) -> dict[str, typing.Any]:
    """attention()'s mask and bias from transformers' forms of them."""
    import torch

    found: dict[str, typing.Any] = {}
    s_k = key.shape[2]
    if position_bias is not None:
        found["bias"] = _floats("position_bias", position_bias, query)[..., :s_k]
    if attention_mask is None:
        return found
    if not isinstance(attention_mask, torch.Tensor):
        raise NotImplementedError(
            f"attention_mask: is a {type(attention_mask).__name__}, must be a tensor [b, 1, s_q, s_k]"
        )
    # [b, s_k] would broadcast as [s_q, s_k]: a plausible, wrong result.
    if attention_mask.dim() != 4 or attention_mask.shape[-1] < s_k:
        raise ValueError(
            f"attention_mask: has shape {tuple(attention_mask.shape)}, must be [b|1, h|1, s_q|1, {s_k}]"
        )
    mask = attention_mask[..., :s_k]  # as long as the cache at least; this call's keys come first
    if mask.dtype is torch.bool:
        from . import _mask_window

        found |= {"mask": mask, **_mask_window.window_of(attention_mask, s_k)}
    elif mask.is_floating_point():
        bias = _floats("attention_mask", mask, query)
        found["bias"] = found["bias"] + bias if found else bias
    else:
        raise TypeError(f"attention_mask: has type {mask.dtype}, must be torch.bool or floating point")
    return found


def _forward(
    module: typing.Any,
    query: typing.Any,
    key: typing.Any,
    value: typing.Any,
    attention_mask: typing.Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: typing.Any = None,
    position_bias: typing.Any = None,
    **others: typing.Any,
) -> tuple[typing.Any, None]:
    """transformers' interface: ``[b, h, s, d]`` in, ``[b, s, h, d]`` and no weights out."""
    for name, reason in REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(f"{name}: {reason}")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    extra = _masks(attention_mask, position_bias, query, key)
    if s_aux is not None:
        extra["sinks"] = s_aux.float()
    if query.shape[0] != key.shape[0] and query.shape[0] == 1:  # learned queries, one for all
        query = query.expand(key.shape[0], -1, -1, -1)
    # Without a mask transformers means torch's rule: causal (top-left) unless one query decodes.
    if is_causal and attention_mask is None and query.shape[2] > 1:
        extra |= {"causal": True, "align": "top-left"}
    try:
        o = attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scaling,
            softcap=softcap or 0.0, dropout_p=dropout if module.training else 0.0, **extra,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, NAMES) from None
    return o, None


def register(name: str = "abacist") -> None:
    """Make ``attn_implementation=name`` of transformers' models run on Abacist.

    Parameters
    ----------
    name : str, default "abacist"

    Raises
    ------
    ImportError
        transformers is not installed, or older than 4.56. What a model asks for and cannot be had is
        refused when it runs, by the names of transformers' own interface.

    Notes
    -----
    Causal masks without padding are not written out: transformers leaves them to the implementation,
    as it does for PyTorch's own attention. Padded batches and sliding windows come as boolean masks,
    a caller's own 4-d masks as they are (bool, or float to be added). Heads of keys and values are
    not repeated. Softcap, sinks (`s_aux`) and `position_bias` of the models that have them are
    passed on. Refused: attention weights (`output_attentions`), `head_mask`, sinks for every query.

    A query that sees no key, as in the padding of a batch, gives 0; eager attention gives the mean
    of all values there. Nothing else depends on those rows.

    Examples
    --------
    >>> abacist.compat.transformers.register()                                    # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="abacist")
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, _forward)
    AttentionMaskInterface.register(name, sdpa_mask)
