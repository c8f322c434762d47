// The entry points around the portable kernel in a draw from a shadow of the weight.
#define FS_PORTABLE
#include "shadow.cu"
