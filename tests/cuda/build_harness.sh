#!/bin/sh
# Builds the stand-alone harness of the Hopper forward kernel, one translation unit at a time.
#   build_harness.sh BUILD_FOLDER [instance ...]     instances: bf16_3 f16_0m ... (default: all)
# Leaves BUILD_FOLDER/forward_harness, forward_extremes, libabacist_sm90.so and the compiler's reports.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$1; shift
instances=$(python3 "$root/src/cuda/sm90/forward/generate_instances.py" "$build/instances" "$@")
mkdir -p "$build/instances"
flags="-std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Xcompiler -fPIC,-Wall -I$build $EXTRA_FLAGS"
wgmma="$build/wgmma.inc"
python3 "$root/src/cuda/ptx/generate_wgmma.py" > "$wgmma.new"
cmp -s "$wgmma.new" "$wgmma" || mv "$wgmma.new" "$wgmma"
list="$build/instances/list.cu"
objects=""
newest=$(find "$root/src/cuda" -type f ! -name '*.cu' -newer "$build/instances/stamp" 2>/dev/null | head -1)
for i in $instances; do
  source="$build/instances/$i.cu"; object="$build/instances/$i.o"
  objects="$objects $object"
  if [ -n "$newest" ] || [ ! -e "$object" ] || [ ! -e "$build/instances/stamp" ]; then
    start=$(date +%s)
    ${NVCC:-nvcc} $flags -Xptxas -v -c "$source" -o "$object" > "$object.log" 2>&1 || { cat "$object.log"; exit 1; }
    echo "$i: $(($(date +%s) - start)) s; $(grep -o 'Used [0-9]* registers' "$object.log" | tail -1); $(grep -o '[0-9]* bytes spill stores' "$object.log" | tail -1); $(grep -c 'C75' "$object.log" || true) notes"
    grep 'C75' "$object.log" | head -3 || true
  fi
done
touch "$build/instances/stamp"
${NVCC:-nvcc} $flags -c "$list" -o "$build/instances/list.o"
for i in launch.cu merge.cu rows.cpp; do
  ${NVCC:-nvcc} $flags -c "$root/src/cuda/sm90/forward/$i" -o "$build/${i%.*}.o"
done
objects="$build/launch.o $build/merge.o $build/rows.o $objects"
${NVCC:-nvcc} $flags -c "$root/tests/cuda/forward_c_entry.cu" -o "$build/c_entry.o"
${NVCC:-nvcc} -shared -o "$build/libabacist_sm90.so" "$build/c_entry.o" "$build/instances/list.o" $objects
for program in forward_harness forward_extremes; do
  object="$build/$program.o"
  if [ "$object" -ot "$root/tests/cuda/$program.cu" ] || [ ! -e "$object" ]; then
    ${NVCC:-nvcc} $flags -c "$root/tests/cuda/$program.cu" -o "$object"
  fi
  ${NVCC:-nvcc} -o "$build/$program" "$object" "$build/instances/list.o" $objects
done
strip "$build/forward_harness" "$build/forward_extremes" "$build/libabacist_sm90.so"
