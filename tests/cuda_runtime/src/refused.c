/* What is refused: memory and events of other processes, symbols of kernels that do not run, old callbacks,
 * and the nodes and kernels of conditional graphs (torch 2.13).
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
REFUSED(cudaGraphAddNode)
REFUSED(cudaGraphConditionalHandleCreate)
REFUSED(cudaKernelSetAttributeForDevice)
REFUSED(cudaLibraryGetKernel)
REFUSED(cudaLibraryLoadData)
REFUSED(cudaLibraryUnload)
REFUSED(cudaStreamBeginCaptureToGraph)
REFUSED(cudaStreamUpdateCaptureDependencies)
