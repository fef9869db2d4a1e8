"""Abacist as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

import typing

from .._attention import attention

__all__ = ["register"]


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
    head_mask: typing.Any = None,
    output_attentions: bool | None = None,
    **_: typing.Any,
) -> tuple[typing.Any, None]:
    """transformers' interface: ``[b, h, s, d]`` in, ``[b, s, h, d]`` and no weights out."""
    for name, given in (("position_bias", position_bias), ("head_mask", head_mask)):
        if given is not None:
            raise NotImplementedError(f"{name}: is not supported, must be None")
    if output_attentions:
        raise NotImplementedError("output_attentions: probabilities are never written, must be False")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    extra: dict[str, typing.Any] = {}
    if attention_mask is not None:
        # As long as the cache at least; the keys of this call are its first.
        attention_mask = attention_mask[..., : key.shape[2]]
        extra["bias" if attention_mask.is_floating_point() else "mask"] = attention_mask
    if s_aux is not None:
        extra["sinks"] = s_aux.float()
    # Without a mask transformers means torch's rule: causal (top-left) unless one query decodes.
    o = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        causal=bool(is_causal and attention_mask is None and query.shape[2] > 1),
        align="top-left", scale=scaling, softcap=softcap or 0.0, dropout_p=dropout, **extra,
    )  # fmt: skip
    return o, None


def register(name: str = "abacist") -> None:
    """Make ``attn_implementation=name`` of transformers' models run on Abacist.

    Parameters
    ----------
    name : str, default "abacist"

    Notes
    -----
    Causal masks without padding are not written out: transformers leaves them to the implementation,
    as it does for PyTorch's own attention. Padded batches and sliding windows come as boolean masks.
    Softcap and sinks of the models that have them are passed on. Attention weights are refused.

    Examples
    --------
    >>> abacist.compat.transformers.register()                                    # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="abacist")
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, _forward)
    AttentionMaskInterface.register(name, sdpa_mask)
