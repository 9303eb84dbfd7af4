// src/state/pending_messages.h - messages that others wait for and that this process sends later.
//
// A member function of a sharded model (`model->encode(x)`) ends with a destructor, which must not
// wait for other processes. If this process used fewer units than others, it owes them messages
// then. They go out with the next call of the model, or before the next collective of the program,
// whichever comes first.
#pragma once

#include "accelerate/api.h"

namespace accelerate::detail::state {

using SendPending = void (*)();

/// What may owe messages installs its function; nullptr means nothing does. Returns the one before.
ACCELERATE_API SendPending set_send_pending(SendPending send) noexcept;

/// Called before a collective that the program asks for. Collective if messages are owed.
void send_pending();

}  // namespace accelerate::detail::state
