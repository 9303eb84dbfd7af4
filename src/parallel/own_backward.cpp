#include "parallel/own_backward.h"

#include <atomic>

namespace accelerate::detail::parallel {
namespace {

std::atomic<int> own_backwards = 0;

}  // namespace

OwnBackward::OwnBackward() noexcept { ++own_backwards; }
OwnBackward::~OwnBackward() { --own_backwards; }

bool own_backward_runs() noexcept { return own_backwards > 0; }

}  // namespace accelerate::detail::parallel
