"""torch.nn.functional.scaled_dot_product_attention on Abacist."""

from __future__ import annotations

import typing

from .. import _abi
from .._attention import attention
from ._names import ERRORS, cast_later, check_types, renamed

NAMES = {
    "q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask",
    "causal": "is_causal",
}  # fmt: skip


def sdpa(
    query: typing.Any,
    key: typing.Any,
    value: typing.Any,
    attn_mask: typing.Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> typing.Any:
    """``torch.nn.functional.scaled_dot_product_attention``: axes ``[b, h, s, d]``, causal top-left.

    Parameters
    ----------
    query, key, value : torch.Tensor
        ``[b, h, s, d]``, or 3 or 2 axes, without the leading ones.
    attn_mask : torch.Tensor, optional
        bool (true: takes part) or float (added to the scores), any shape that broadcasts to
        ``[b, h, s_q, s_k]``. Not together with `is_causal`.
    dropout_p, is_causal, scale
        As in torch; the seed of dropout comes from torch's default generator.
    enable_gqa : bool, default False
        Allow fewer heads in key and value; they must divide those of query.

    Returns
    -------
    torch.Tensor
        ``[b, h, s_q, d_v]``. A row that sees no key is 0.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Each names the argument. NotImplementedError: more than 4 axes.

    References
    ----------
    .. [1] https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

    Examples
    --------
    >>> import torch
    >>> from abacist.compat import sdpa
    >>> q = k = v = torch.ones(1, 2, 4, 8)
    >>> sdpa(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 4, 8])
    """
    import torch

    names = {"query": query, "key": key, "value": value}
    given = names if attn_mask is None else {**names, "attn_mask": attn_mask}
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor")
        if x.is_nested:
            raise TypeError(f"{name}: is a nested tensor, must be a plain one")
    enable_gqa = _abi.flag("enable_gqa", enable_gqa)
    axes = {name: x.dim() for name, x in names.items()}
    if len(set(axes.values())) != 1:
        raise ValueError(f"query, key, value: have {tuple(axes.values())} axes, must have as many")
    rank = axes["query"]
    if rank > 4:
        raise NotImplementedError(f"query: has {rank} axes; more than 4 are not supported")
    if rank < 2:
        raise ValueError(f"query: has {rank} axes, must have at least 2")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: is given with is_causal=True, must be one of them")
    check_types(**names)
    for name in ("key", "value"):
        heads = names[name].shape[-3] if rank > 2 else 1
        if not enable_gqa and rank > 2 and heads != query.shape[-3]:
            raise ValueError(
                f"{name}: has {heads} heads, must be {query.shape[-3]} (or enable_gqa=True)"
            )
    for _ in range(4 - rank):
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    extra: dict[str, typing.Any] = {}
    if attn_mask is not None:
        if attn_mask.is_floating_point() and cast_later(query):
            attn_mask = attn_mask.float()
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            raise TypeError(
                f"attn_mask: has type {attn_mask.dtype}, must be torch.bool, torch.float32 or that of query"
            )
        extra["bias" if attn_mask.is_floating_point() else "mask"] = _spread(attn_mask, key)
    try:
        o = attention(
            query, key, value, causal=is_causal, dropout_p=dropout_p, scale=scale,
            layout="bhsd", align="top-left", **extra,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, NAMES) from None
    return o.reshape(o.shape[4 - rank :])


def _spread(attn_mask: typing.Any, key: typing.Any) -> typing.Any:
    """The library wants the mask's last axis in full; a stride of 0 serves."""
    s_k = key.shape[-2]
    if attn_mask.dim() > 0 and attn_mask.shape[-1] == 1 and s_k != 1:
        return attn_mask.expand(*attn_mask.shape[:-1], s_k)
    if attn_mask.dim() == 0:
        return attn_mask.expand(s_k)
    return attn_mask
