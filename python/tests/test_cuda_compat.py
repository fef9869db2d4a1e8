"""The names that people use already, torch.compile and models, on CUDA tensors: the host's results, or a reason."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import abacist  # noqa: E402
from abacist.compat import flash_attn, sdpa  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and abacist.has_backend("cuda")),
    reason="no CUDA device here, or libabacist built without ABACIST_CUDA",
)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device="cuda")


def starts(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)


def same(function, *arguments, **options):
    """The function's result on CUDA tensors is near to that on the same tensors on the host."""
    found = function(*arguments, **options)
    expected = function(*(to_host(x) for x in arguments), **{n: to_host(x) for n, x in options.items()})
    if not isinstance(found, tuple):
        found, expected = (found,), (expected,)
    for x, y in zip(found, expected):
        if y is None:
            assert x is None
            continue
        assert x.is_cuda and x.dtype is y.dtype and x.shape == y.shape
        close = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-3}[x.dtype]
        most = float(y[y.isfinite()].abs().max())
        torch.testing.assert_close(x.cpu().double(), y.double(), rtol=close, atol=close * (1 + most))


def to_host(x):
    return x.cpu() if isinstance(x, torch.Tensor) else x


FLASH_OPTIONS = [
    {}, dict(causal=True), dict(window_size=(30, -1)), dict(causal=True, softcap=5.0, softmax_scale=0.3),
    dict(causal=True, alibi_slopes=True)]  # fmt: skip


@pytest.mark.parametrize("options", FLASH_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attn(dtype, options):
    torch.manual_seed(1)
    if "alibi_slopes" in options:
        options = {**options, "alibi_slopes": torch.rand(6, device="cuda")}
    q, kv = random(2, 90, 6, 64, dtype=dtype), random(2, 150, 2, 2, 64, dtype=dtype)
    same(flash_attn.flash_attn_func, q, *kv.unbind(2), return_attn_probs=True, **options)
    same(flash_attn.flash_attn_kvpacked_func, q, kv, return_attn_probs=True, **options)
    qkv = random(2, 90, 3, 6, 64, dtype=dtype)
    same(flash_attn.flash_attn_qkvpacked_func, qkv, return_attn_probs=True, **options)


@pytest.mark.parametrize("options", FLASH_OPTIONS)
def test_flash_attn_varlen(options):
    torch.manual_seed(2)
    if "alibi_slopes" in options:
        options = {**options, "alibi_slopes": torch.rand(4, device="cuda")}
    cu_q, cu_k = starts(5, 0, 130, 64), starts(70, 9, 200, 64)
    q, kv, qkv = random(199, 4, 128), random(343, 2, 2, 128), random(199, 3, 4, 128)
    lengths = cu_q, cu_k, 130, 200
    same(flash_attn.flash_attn_varlen_func, q, *kv.unbind(1), *lengths, return_attn_probs=True, **options)
    same(flash_attn.flash_attn_varlen_kvpacked_func, q, kv, *lengths, return_attn_probs=True, **options)
    same(flash_attn.flash_attn_varlen_qkvpacked_func, qkv, cu_q, 130, return_attn_probs=True, **options)


def test_sdpa():
    torch.manual_seed(3)
    q, k, v = random(2, 4, 90, 64), random(2, 2, 150, 64), random(2, 2, 150, 64)
    for options in ({}, {"is_causal": True}, {"scale": 0.1}):
        same(sdpa, q, k, v, enable_gqa=True, **options)
    same(sdpa, q[0], k[0, :1].expand(4, -1, -1), v[0, :1].expand(4, -1, -1))


def test_what_gpus_cannot_do_is_refused_by_name():
    q = random(1, 2, 40, 64)
    with pytest.raises(NotImplementedError, match="a boolean mask .*cannot be used on a GPU"):
        sdpa(q, q, q, attn_mask=torch.ones(40, 40, dtype=torch.bool, device="cuda"))
    with pytest.raises(NotImplementedError, match="no dropout on a GPU"):
        sdpa(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match="attn_mask: is on cpu, must be on cuda:0"):
        sdpa(q, q, q, attn_mask=torch.ones(40, 40, dtype=torch.bool))
    q = q.transpose(1, 2)
    with pytest.raises(NotImplementedError, match="is on cuda:0; caches are served on the CPU only"):
        flash_attn.flash_attn_with_kvcache(q, q.clone(), q.clone())


def test_opcheck():
    from abacist import _ops  # noqa: F401: registers the operators

    q, kv = random(1, 40, 4, 64), random(1, 50, 2, 64)
    rest = (None,) * 5 + (True, [2, -1], None, 0.0, "bottom-right", 0, 0, 0.0, 0, False, None)
    with torch.no_grad():
        sinks = torch.rand(4, device="cuda")
        torch.library.opcheck(torch.ops.abacist.attention, (q, kv, kv, None, sinks, *rest))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(mode):
    """As one operator in a graph of Triton kernels; with CUDA graphs, too."""
    q, k, v = random(2, 100, 8, 64), random(2, 100, 2, 64), random(2, 100, 2, 64)

    def step(q, k, v):
        o, lse = abacist.attention(q * 2, k, v + 1, causal=True, return_lse=True)
        return o.sin() + 1, lse * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(4):  # graphs are captured at the second call
        q.copy_(torch.randn_like(q))
        with torch.no_grad():
            found, expected = [x.clone() for x in compiled(q, k, v)], step(q, k, v)
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.fixture(scope="module")
def llamas():
    """One model in float32 with eager attention, and the same in bf16 with eager and with ours."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from abacist.compat.transformers import register

    register()
    config = dict(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0,
                  eos_token_id=None, initializer_range=0.3)  # fmt: skip
    models, half = [], torch.bfloat16
    for implementation, dtype in (("eager", torch.float32), ("eager", half), ("abacist", half)):
        torch.manual_seed(4)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**config, attn_implementation=implementation))  # fmt: skip
        models.append(model.eval().to("cuda", dtype))
    return models


def test_a_model_of_transformers(llamas):
    """Ours in bf16 is as near to float32 as eager attention in bf16 is."""
    exact, eager, ours = llamas
    tokens = torch.randint(1, 50, (2, 70), device="cuda")
    with torch.no_grad():
        expected, *found = (model(tokens).logits.double() for model in (exact, eager, ours))
    apart = [float((x - expected).norm() / expected.norm()) for x in found]
    print(f"\nlogits apart from float32's: eager {apart[0]:.1e}, ours {apart[1]:.1e}")
    assert 0 < apart[1] < 1.5 * apart[0] + 1e-3


def test_a_model_writes_behind_its_cache(llamas):
    """Each token that is written is the likeliest of one pass over all of them, within rounding."""
    ours = copy.deepcopy(llamas[2]).half()
    tokens = torch.randint(1, 50, (2, 9), device="cuda")
    written = ours.generate(tokens, max_new_tokens=20, min_new_tokens=20, do_sample=False,
                            attention_mask=torch.ones_like(tokens))  # fmt: skip
    with torch.no_grad():
        logits = ours(written).logits[:, 8:-1].float()
    chosen = logits.gather(-1, written[:, 9:, None])[..., 0]
    assert (logits.max(-1).values - chosen).max() <= 0.01 * logits.abs().max()


def test_a_padded_batch_of_a_model_is_refused_with_the_reason(llamas):
    tokens = torch.randint(1, 50, (2, 300), device="cuda")
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    with pytest.raises(NotImplementedError, match="a boolean mask .*cannot be used on a GPU"):
        llamas[2](tokens, attention_mask=mask)
