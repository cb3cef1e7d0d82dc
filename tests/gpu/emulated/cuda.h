// Stands in for CUDA, so that the kernels run on a CPU: a fiber a CUDA thread, an OS thread a block. Nothing here is fast,
// or like a GPU in what it costs; what programs may observe is like one.
#pragma once

#include <sched.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __CUDACC__

using std::max;
using std::min;

#include "numbers.h"
#include "primitives.h"
#include "runtime.h"
#include "threads.h"
