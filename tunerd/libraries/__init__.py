"""NVIDIA's libraries of kernels, as candidates and in artifacts. Nothing is loaded unasked.

A kernel of a library cannot be taken out of it: what is stored, compiled and shipped says which of
its algorithms to call, and the library is needed wherever that runs. So a kernel goes this way:

    candidates/libraries   matches a task and writes a call: what is computed, and by which of the
                           algorithms that the library's heuristic names for the share's SMs
    builder, artifacts     compile host code that calls `tunerd.library.NAME`, a packed function,
                           with the call as text and the pointers of its tensors
    runner, loading        `calls.provide` what builds and manifests name, before anything runs:
                           it registers the function, and makes handles and descriptors

A call allocates nothing and waits for nothing, so that a CUDA graph can capture it: its workspace
is scratch memory of the kernel, which TVM's planner lays into the artifact's own, and it goes to
TVM's current stream. Tuners have no GPU. cuBLASLt's heuristic needs one, so it is asked where a
call is made ready; it names the same algorithms wherever the library's version, the GPU and the SMs
are the same. cuDNN's takes a described GPU, so tuners ask it, and a call says the plan itself. The
manifest says which version was there.

packages (where libraries are) -> cublaslt, cudnn (calls by ctypes) -> calls (the packed functions)
cudnn_graphs (what is sent)    -> cudnn -> naming (asks for plans, in a process without a GPU)
"""
