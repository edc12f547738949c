// What torch's XPU build exports and the modules of vllm-xpu-kernels want from it, so that they load beside a CPU build
// and register their operators. A module that calls one of these functions ends the process: no kernel can run here.
#include <cstdio>
#include <cstdlib>

#define REFUSES(number, symbol)                                      \
  extern "C" void refuses_##number() __asm__(symbol);                \
  extern "C" void refuses_##number() {                               \
    std::fputs("the stub of torch's XPU runtime was called\n", stderr); \
    std::abort();                                                    \
  }

REFUSES(0, "_ZN2at3xpu19getDevicePropertiesEa")
REFUSES(1, "_ZN3c103xpu10set_deviceEa")
REFUSES(2, "_ZN3c103xpu14current_deviceEv")
REFUSES(3, "_ZN3c103xpu14get_raw_deviceEa")
REFUSES(4, "_ZN3c103xpu18get_device_contextEv")
REFUSES(5, "_ZN3c103xpu19getCurrentXPUStreamEa")
REFUSES(6, "_ZN3c103xpu28device_count_ensure_non_zeroEv")
REFUSES(7, "_ZNK3c103xpu9XPUStream5queueEv")
REFUSES(8, "_ZNK3c103xpu9XPUStream8priorityEv")

extern "C" int no_devices() __asm__("_ZN3c103xpu12device_countEv");
extern "C" int no_devices() { return 0; }

extern "C" {
extern void *no_allocator __asm__("_ZN3c103xpu19XPUCachingAllocator9allocatorE");
void *no_allocator = nullptr;
}
