// A program without Torch that does what its arguments say (actions.h). It starts in a millisecond,
// so tests of the launcher that need no process group use it.
#include "launch/actions.h"

int main(int argc, char** argv) { return accelerate::test::act({argv + 1, argv + argc}); }
