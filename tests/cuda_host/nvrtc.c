// Stands in for NVRTC: its machine code is an ELF mark and the text, its errors are texts
// that hold "wrong". See test_cuda_compile.py.
#include <stdlib.h>
#include <string.h>

typedef struct { char* text; int failed; } Program;

int nvrtcVersion(int* major, int* minor) { *major = 13, *minor = 7; return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 2; return 0; }
int nvrtcGetSupportedArchs(int* known) { known[0] = 80, known[1] = 90; return 0; }
const char* nvrtcGetErrorString(int code) { return code == 5 ? "no text" : "success"; }

int nvrtcCreateProgram(Program** made, const char* text, const char* name, int headers,
                       const char** sources, const char** names) {
  if (!*text) return 5;
  *made = calloc(1, sizeof(Program));
  (*made)->text = strdup(text);
  return 0;
}

int nvrtcDestroyProgram(Program** made) {
  free((*made)->text), free(*made);
  return 0;
}

int nvrtcCompileProgram(Program* made, int count, const char** options) {
  return made->failed = count < 1 || strstr(made->text, "wrong") != NULL;
}

int nvrtcGetProgramLogSize(Program* made, size_t* size) { *size = 12; return 0; }
int nvrtcGetProgramLog(Program* made, char* log) { strcpy(log, "line 3: bad"); return 0; }
int nvrtcGetCUBINSize(Program* made, size_t* size) {
  *size = 4 + strlen(made->text);
  return 0;
}
int nvrtcGetCUBIN(Program* made, char* code) {
  memcpy(code, "\x7f" "ELF", 4), memcpy(code + 4, made->text, strlen(made->text));
  return 0;
}
