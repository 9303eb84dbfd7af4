// tests/launch/actions.h - what the programs of the launcher's tests can be told to do.
//
// Each argument is an action, carried out in order: `name`, `name=value`, or with the rank that
// shall do it in front, `1:exit=3`. So a test reads as what happens:
//
//     probe say=hello 1:exit=3 wait
//
// Without Torch: json, env=A,B, say=, err=, part=, terminal, descriptors, signals, folder,
// chatter=N, write=FILE:TEXT, ready=FILE, until=FILE, sleep=SECONDS, wait, trap=CODE,
// ignore=SIGNAL, hear=SIGNAL, grandchild, escaped_grandchild, flaky=K, signal=NAME, exit=CODE.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace accelerate::test {

using Action = std::function<void(const std::string& value)>;

/// The integer in a variable, or `otherwise`.
[[nodiscard]] int number_from(const char* variable, int otherwise);

/// One write for one line, so that lines of several processes stay whole.
void say(int fd, const std::string& line);

/// Carries out the arguments; returns the exit code. `more` are the actions that only the caller
/// has. An unknown word ends the program with code 64.
int act(const std::vector<std::string>& arguments, const std::map<std::string, Action>& more = {});

}  // namespace accelerate::test
