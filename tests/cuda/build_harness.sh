#!/bin/sh
# Builds the stand-alone harness of the Hopper forward kernel, one translation unit at a time.
#   build_harness.sh BUILD_FOLDER [instance ...]     instances: bf16_128 f16_192_128 ... (default: all)
# Leaves BUILD_FOLDER/forward_harness, BUILD_FOLDER/libabacist_sm90.so and the compiler's reports.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$1; shift
all=""
for i in 0 1 2 3 4 5 6 7; do all="$all bf16_$i f16_$i"; done
for i in 0 2 3 5 6; do all="$all bf16_${i}m f16_${i}m"; done
instances=${*:-$all}
mkdir -p "$build/instances"
flags="-std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Xcompiler -fPIC,-Wall -I$build $EXTRA_FLAGS"
wgmma="$build/wgmma.inc"
python3 "$root/src/cuda/ptx/generate_wgmma.py" 64 80 96 112 128 144 160 176 192 256 > "$wgmma.new"
cmp -s "$wgmma.new" "$wgmma" || mv "$wgmma.new" "$wgmma"
list="$build/instances/list.cu"
{
  echo '#include "'$root'/src/cuda/sm90/forward/instance.hpp"'
  echo 'namespace abacist::cuda::sm90 {'
  for i in $instances; do echo "extern const ForwardInstance forward_$i;"; done
  echo 'extern const ForwardInstance* const kForwardInstances[] = {'
  for i in $instances; do echo "    &forward_$i,"; done
  echo '};'
  echo 'extern const int kForwardInstanceCount = sizeof(kForwardInstances) / sizeof(kForwardInstances[0]);'
  echo '}  // namespace abacist::cuda::sm90'
} > "$list"
objects=""
newest=$(find "$root/src/cuda" -type f ! -name '*.cu' -newer "$build/instances/stamp" 2>/dev/null | head -1)
for i in $instances; do
  source="$build/instances/$i.cu"; object="$build/instances/$i.o"
  objects="$objects $object"
  if [ -n "$newest" ] || [ ! -e "$object" ] || [ ! -e "$build/instances/stamp" ]; then
    type=${i%%_*}; shape=${i#*_}; modified=false
    case $shape in *m) modified=true; shape=${shape%m};; esac
    element=__nv_bfloat16; [ "$type" = f16 ] && element=__half
    cat > "$source" <<END
#include "$root/src/cuda/sm90/forward/instance.cuh"
namespace abacist::cuda::sm90 {
extern const ForwardInstance forward_$i =
    make_forward_instance<$shape, $element, $modified>();
}  // namespace abacist::cuda::sm90
END
    start=$(date +%s)
    ${NVCC:-nvcc} $flags -Xptxas -v -c "$source" -o "$object" > "$object.log" 2>&1 || { cat "$object.log"; exit 1; }
    echo "$i: $(($(date +%s) - start)) s; $(grep -o 'Used [0-9]* registers' "$object.log" | tail -1); $(grep -o '[0-9]* bytes spill stores' "$object.log" | tail -1); $(grep -c 'C75' "$object.log" || true) notes"
    grep 'C75' "$object.log" | head -3 || true
  fi
done
touch "$build/instances/stamp"
${NVCC:-nvcc} $flags -c "$list" -o "$build/instances/list.o"
${NVCC:-nvcc} $flags -c "$root/src/cuda/sm90/forward/launch.cu" -o "$build/launch.o"
${NVCC:-nvcc} $flags -c "$root/tests/cuda/forward_c_entry.cu" -o "$build/c_entry.o"
${NVCC:-nvcc} -shared -o "$build/libabacist_sm90.so" "$build/launch.o" "$build/c_entry.o" "$build/instances/list.o" $objects
if [ "$build/forward_harness.o" -ot "$root/tests/cuda/forward_harness.cu" ] || [ ! -e "$build/forward_harness.o" ]; then
  ${NVCC:-nvcc} $flags -c "$root/tests/cuda/forward_harness.cu" -o "$build/forward_harness.o"
fi
${NVCC:-nvcc} -o "$build/forward_harness" "$build/forward_harness.o" "$build/launch.o" "$build/instances/list.o" $objects
strip "$build/forward_harness" "$build/libabacist_sm90.so"
