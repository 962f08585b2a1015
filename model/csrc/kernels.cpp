// One instruction set's table of kernels. Compiled once for each, with -DWG_ISA=name and that set's -m flags.
#include "attention.h"
#include "linear.h"
#include "rowwise.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#else
namespace {
constexpr bool (*tiles_work)(const wavegraph::Kernels*) = nullptr;
}
#endif

#define WG_JOIN_(a, b) a##b
#define WG_JOIN(a, b) WG_JOIN_(a, b)
#define WG_TEXT_(a) #a
#define WG_TEXT(a) WG_TEXT_(a)

// Constants alone: code that ran when the library is loaded might not suit the CPU.
extern "C" const wavegraph::Kernels WG_JOIN(wavegraph_kernels_, WG_ISA) = {
    WG_TEXT(WG_ISA), W, tiles_work, linear, norm, rope_write, attention, scatter_gate, argmax,
};
