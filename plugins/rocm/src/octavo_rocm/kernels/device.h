// What `gemv.hip` asks of a GPU, by the compiler's builtins alone: no header of a ROCm release, no device library.
// Compiled in front of it. WAVE: threads of a wavefront, 64 or 32. tests/host_device.h is the same for a CPU.
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256)))
#define DEVICE static __attribute__((device, unused)) inline

DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int block_index() { return __builtin_amdgcn_workgroup_id_x(); }

// The number of the lane whose index differs in the bits of `mask`. All lanes of a wave call it together.
DEVICE float from_lane(float number, int mask) {
  int lane = thread_index() % WAVE;
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane ^ mask) * 4, __builtin_bit_cast(int, number)));
}

// A load of what is read once: it need not push other things out of the caches.
#define STREAM(pointer) __builtin_nontemporal_load(pointer)
