// tests/resume/fault_shim.h - system calls that fail when they are told to.
//
// fault_shim.cpp is loaded by LD_PRELOAD. Calls on paths below the folder of the variable
// FAULT_FOLDER, and on descriptors of such files, are counted; the one with the number that was
// armed fails. The program finds the functions by `dlsym`.
#pragma once

extern "C" {

/// Not an error: the write transfers only half of what it is given.
inline constexpr int kShortWrite = -1;

/// Call number `call` from now on, counted from 1, fails with `error`, or is a short write; then
/// only writes of two bytes or more count. 0 disarms.
using FaultArm = void(long call, int error);
/// The name and path of the call that failed since `fault_arm`; "" if none did.
using FaultFired = const char*();

FaultArm fault_arm;
FaultFired fault_fired;
}
