// The module of peer.cu, on a CPU. Streams are numbers.
#include "cuda.h"
// Then what stands on it.
#include "peer.cu"

namespace emulated {

// Whether all kernels of a stream have ended.
int64_t idle(int64_t number) { return stream(number).idle(); }

// Which form the kernels of transports that are made from now on have; none may be running.
void set_plain(int64_t given) { plain = given != 0; }

}  // namespace emulated

TVM_FFI_DLL_EXPORT_TYPED_FUNC(idle, emulated::idle)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_plain, emulated::set_plain)
