// The module of peer.cu, on a CPU. Streams are numbers.
#include "cuda.h"
// Then what stands on it.
#include "peer.cu"

namespace emulated {

// Whether all kernels of a stream have ended.
int64_t idle(int64_t number) { return stream(number).idle(); }

}  // namespace emulated

TVM_FFI_DLL_EXPORT_TYPED_FUNC(idle, emulated::idle)
