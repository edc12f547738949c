// The host side: plain C functions over SYCL's own, so that Python binds them with ctypes.
//
// It knows no kernel. Kernels come as source text and are compiled for the device of a queue when they are first asked
// for (the extension sycl_ext_oneapi_kernel_compiler); a launch names one, its groups and its arguments.
// A function that fails returns null or 1, and octavo_xpu_error() says why, for the calling thread.

#include <sycl/sycl.hpp>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace syclexp = sycl::ext::oneapi::experimental;
using Bundle = sycl::kernel_bundle<sycl::bundle_state::executable>;

static thread_local std::string last_error;

template <typename F>
static auto guarded(F &&body, decltype(body()) failed) -> decltype(body()) {
  try {
    last_error.clear();
    return body();
  } catch (const std::exception &error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an unknown exception";
  }
  return failed;
}

EXPORT int octavo_xpu_abi() { return 2; }

EXPORT const char *octavo_xpu_error() { return last_error.c_str(); }

// An in-order queue of this library's own on the first CPU device. Queues of real devices are torch's.
EXPORT sycl::queue *octavo_xpu_cpu_queue() {
  return guarded([] { return new sycl::queue{sycl::cpu_selector_v, sycl::property::queue::in_order{}}; },
                 static_cast<sycl::queue *>(nullptr));
}

// "name, driver version" of the queue's device, cut to `size` bytes with the final zero.
EXPORT int octavo_xpu_describe(sycl::queue *queue, char *text, int64_t size) {
  return guarded(
      [&] {
        auto device = queue->get_device();
        if (!device.ext_oneapi_can_compile(syclexp::source_language::sycl))
          throw std::runtime_error("this device's runtime cannot compile SYCL at run time");
        std::string words = device.get_info<sycl::info::device::name>() + ", driver " +
                            device.get_info<sycl::info::device::driver_version>();
        std::strncpy(text, words.c_str(), size - 1);
        text[size - 1] = 0;
        return 0;
      },
      1);
}

// What the device's matrix units multiply in the shape of kernels/matrix.h: 1 bfloat16, 2 float16, 4 int8, added up.
EXPORT int octavo_xpu_matrix(sycl::queue *queue) {
  return guarded(
      [&] {
        using syclexp::matrix::matrix_type;
        int found = 0;
        for (auto &c : queue->get_device().get_info<syclexp::info::device::matrix_combinations>()) {
          if (c.msize != 8 || c.nsize != 16 || c.atype != c.btype) continue;
          if (c.atype == matrix_type::bf16 && c.ksize == 16 && c.ctype == matrix_type::fp32) found |= 1;
          if (c.atype == matrix_type::fp16 && c.ksize == 16 && c.ctype == matrix_type::fp32) found |= 2;
          if (c.atype == matrix_type::sint8 && c.ksize == 32) found |= 4;
        }
        return found;
      },
      0);
}

// Compile a source for the device of a queue.
EXPORT Bundle *octavo_xpu_build(sycl::queue *queue, const char *source) {
  std::string log;
  Bundle *bundle = guarded(
      [&] {
        auto text = syclexp::create_kernel_bundle_from_source(queue->get_context(), syclexp::source_language::sycl,
                                                              std::string(source));
        return new Bundle(syclexp::build(text, syclexp::properties{syclexp::save_log{&log}}));
      },
      static_cast<Bundle *>(nullptr));
  if (!bundle && !log.empty()) last_error += "\n" + log;
  return bundle;
}

EXPORT sycl::kernel *octavo_xpu_kernel(Bundle *bundle, const char *name) {
  return guarded([&] { return new sycl::kernel(bundle->ext_oneapi_get_kernel(name)); },
                 static_cast<sycl::kernel *>(nullptr));
}

// Run a kernel on groups[3] groups of local[3] items. kinds: a letter for each argument, whose bits are in `values`:
// p a pointer of unified memory, l an int64, f a float. wait: return when it is done.
EXPORT int octavo_xpu_launch(sycl::queue *queue, const sycl::kernel *kernel, const int64_t *groups,
                             const int64_t *local, const char *kinds, const uint64_t *values, int wait) {
  return guarded(
      [&] {
        sycl::range<3> inner(local[0], local[1], local[2]);
        sycl::range<3> outer(groups[0] * local[0], groups[1] * local[1], groups[2] * local[2]);
        auto event = queue->submit([&](sycl::handler &handler) {
          for (int i = 0; kinds[i]; ++i) {
            if (kinds[i] == 'p') {
              handler.set_arg(i, reinterpret_cast<void *>(values[i]));
            } else if (kinds[i] == 'l') {
              handler.set_arg(i, static_cast<int64_t>(values[i]));
            } else {
              float number;
              std::memcpy(&number, &values[i], sizeof number);
              handler.set_arg(i, number);
            }
          }
          handler.parallel_for(sycl::nd_range<3>(outer, inner), *kernel);
        });
        if (wait) event.wait_and_throw();
        return 0;
      },
      1);
}
