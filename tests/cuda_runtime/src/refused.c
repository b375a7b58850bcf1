/* What is refused: memory and events of other processes, symbols of kernels that do not run, old callbacks.
 *
 * Without the header of the runtime, whose declarations would ask for arguments that nothing reads. */
#include <driver_types.h>

cudaError_t failed(cudaError_t error, const char *function);

#define REFUSED(function) \
    cudaError_t function(void) { return failed(cudaErrorNotSupported, #function); }
REFUSED(cudaIpcCloseMemHandle)
REFUSED(cudaIpcGetEventHandle)
REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenEventHandle)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaGetSymbolAddress)
REFUSED(cudaMemcpyToSymbol)
REFUSED(cudaStreamAddCallback)
