// Launches of `gemv.hip` on a CPU, as hipModuleLaunchKernel takes them: pointers to the arguments.
#define LAUNCH(name)                                                                                        \
  static void name##_body(void** a) {                                                                       \
    name(*(const u16**)a[0], *(long*)a[1], *(const unsigned char**)a[2], *(const unsigned**)a[3],           \
         *(const u16**)a[4], *(u16**)a[5], *(long*)a[6], *(int*)a[7], *(int*)a[8]);                         \
  }                                                                                                         \
  extern "C" void launch_##name(int grid, int threads, void** a) { run_grid(name##_body, grid, threads, a); }
LAUNCH(gemv_1)
LAUNCH(gemv_2)
LAUNCH(gemv_3)
LAUNCH(gemv_4)
LAUNCH(unpack)
