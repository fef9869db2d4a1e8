"""Names the machine of a measurement."""

import pathlib
import platform
import re


def read(path):
    try:
        return pathlib.Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def cpu_model():
    info = read("/proc/cpuinfo") or ""
    found = dict(re.findall(r"^(model name|cpu family|model|stepping)\s*:\s*(.+)$", info,
                            re.MULTILINE))
    name = found.get("model name", platform.machine())
    numbers = [found[key] for key in ("cpu family", "model", "stepping") if key in found]
    return f"{name} ({'/'.join(numbers)})" if numbers else name


def clock_mhz():
    """The first core's clock now, where the machine tells (a virtual one often does not)."""
    if now := read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"):
        return round(int(now) / 1000)
    return None


def simd():
    flags = set((read("/proc/cpuinfo") or "").split("flags", 1)[-1].split("\n", 1)[0].split())
    known = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    return [flag for flag in known if flag in flags]


def describe(threads):
    return {
        "cpu": cpu_model(),
        "simd": simd(),
        "threads": threads,
        "l2_per_core": read("/sys/devices/system/cpu/cpu0/cache/index2/size"),
        "l3": read("/sys/devices/system/cpu/cpu0/cache/index3/size"),
    }
