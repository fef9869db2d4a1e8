"""Writes wgmma.inc: one function per wgmma shape that the sm_90 kernels use.

    python3 generate_wgmma.py > BUILD/wgmma.inc

PTX wants every accumulator register spelled out (N / 2 of them), which C++ cannot loop over inside
an asm statement. So the text is generated into the build folder; nothing generated is committed.

wgmma_ss<Element, TransposeB>: A and B in shared memory. wgmma_rs: A in registers.
accumulate = 0 overwrites the accumulator. A is K-major; TransposeB = 1 says B is MN-major.
"""


def function(n: int, ptx_type: str, element: str, a_in_registers: bool) -> str:
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if a_in_registers:
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
        used, parameter, name = 4, "const uint32_t (&a)[4]", "wgmma_rs"
        transpose = "%{t}"
    else:
        a, a_inputs = f"%{count}", '"l"(a)'
        used, parameter, name = 1, "uint64_t a", "wgmma_ss"
        transpose = "0, %{t}"
    b, accumulate, flag = count + used, count + used + 1, count + used + 2
    return (
        f"template <class Element, int TransposeB>\n"
        f"  requires std::is_same_v<Element, {element}>\n"
        f"__device__ __forceinline__ void {name}(float (&d)[{count}], {parameter}, uint64_t b,\n"
        f"    int accumulate) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{accumulate}, 0;"\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx_type}.{ptx_type} "\n'
        f'               "{{{accumulators}}}, "\n'
        f'               "{a}, %{b}, p, 1, 1, {transpose.format(t=flag)};}}"\n'
        f'               : {outputs} : {a_inputs}, "l"(b), "r"(accumulate), "n"(TransposeB));\n}}\n'
    )


SIZES = (64, 80, 96, 112, 128, 144, 160, 176, 192, 256)

if __name__ == "__main__":
    for size in SIZES:
        for ptx_type, element in (("bf16", "__nv_bfloat16"), ("f16", "__half")):
            for a_in_registers in (False, True):
                print(function(size, ptx_type, element, a_in_registers))
