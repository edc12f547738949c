/* A PJRT plugin in front of XLA's CPU plugin (whose path is in OCTAVO_TEST_PJRT), for tests only. It passes everything
 * on but for two calls: torch_tpu creates its client with options that only libtpu knows, and asks compiled programs
 * for the kinds of memory of their outputs, which the CPU plugin does not answer. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "pjrt_c_api.h"

static const PJRT_Api *real;
static union {
  PJRT_Api api;
  char bytes[1 << 13];
} proxy;

static PJRT_Error *create(PJRT_Client_Create_Args *args) {
  const PJRT_NamedValue *options = args->create_options;
  size_t num_options = args->num_options;
  args->create_options = NULL;
  args->num_options = 0;
  PJRT_Error *error = real->PJRT_Client_Create(args);
  args->create_options = options;
  args->num_options = num_options;
  return error;
}

/* The arrays live as long as the process: callers keep the pointers, and a test compiles some hundred programs. */
static PJRT_Error *output_memory_kinds(PJRT_Executable_OutputMemoryKinds_Args *args) {
  PJRT_Executable_NumOutputs_Args count;
  memset(&count, 0, sizeof count);
  count.struct_size = sizeof count;
  count.executable = args->executable;
  PJRT_Error *error = real->PJRT_Executable_NumOutputs(&count);
  if (error) return error;
  const char **kinds = malloc(sizeof(char *) * (count.num_outputs + 1));
  size_t *sizes = malloc(sizeof(size_t) * (count.num_outputs + 1));
  for (size_t i = 0; i < count.num_outputs; i++) {
    kinds[i] = "device";
    sizes[i] = strlen("device");
  }
  args->num_outputs = count.num_outputs;
  args->memory_kinds = kinds;
  args->memory_kind_sizes = sizes;
  return NULL;
}

const PJRT_Api *GetPjrtApi(void) {
  if (real) return &proxy.api;
  const char *path = getenv("OCTAVO_TEST_PJRT");
  void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  if (!library) {
    fprintf(stderr, "OCTAVO_TEST_PJRT: %s\n", path ? dlerror() : "not set");
    return NULL;
  }
  const PJRT_Api *(*get)(void) = (const PJRT_Api *(*)(void))dlsym(library, "GetPjrtApi");
  const PJRT_Api *api = get ? get() : NULL;
  if (!api || api->struct_size > sizeof proxy) return NULL;
  memcpy(&proxy, api, api->struct_size);
  real = api;
  proxy.api.PJRT_Client_Create = create;
  proxy.api.PJRT_Executable_OutputMemoryKinds = output_memory_kinds;
  return &proxy.api;
}
