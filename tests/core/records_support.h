// What Python Accelerate makes of its records, and ours in the same form.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs/options.h"
#include "accelerate/value.h"
#include "reference.h"

namespace accelerate::testing {

/// Keeps the order of keys, and compares it.
using Json = nlohmann::ordered_json;

/// tests/reference/records/records.json.
inline const Json& reference() {
  static const Json json =
      Json::parse(test::read_file(test::reference_path("records/records.json")));
  return json;
}

inline Json to_json(const Value& value) {
  if (value.is_none()) return nullptr;
  if (value.is_bool()) return value.as_bool();
  if (value.is_int()) return value.as_int();
  if (value.is_double()) {
    return std::isinf(value.as_double()) ? Json("inf") : Json(value.as_double());
  }
  if (value.is_string()) return value.as_string();
  if (value.is_dict()) {
    Json json = Json::object();
    for (const auto& [key, entry] : value.as_dict()) json[key.to_string()] = to_json(entry);
    return json;
  }
  Json json = Json::array();
  for (const auto& item : value.items()) json.push_back(to_json(item));
  return json;
}

inline Environment environment_of(const Json& entry) {
  return Environment(entry.at("environment").get<std::map<std::string, std::string>>());
}

/// `ours` without what Python's nested objects do not have, and in the order of those.
inline Json without_extras(Json ours, const Json& theirs) {
  for (auto& [name, value] : ours.items()) {
    if (!value.is_object() || !theirs.contains(name) || !theirs[name].is_object()) continue;
    Json kept = Json::object();
    for (const auto& [key, entry] : theirs[name].items()) {
      if (value.contains(key)) kept[key] = value[key];
    }
    value = kept;
  }
  return ours;
}

/// The record has Python's fields, in Python's order, with Python's values in the environment of
/// the case. `differences` are the fields in which we mean to differ.
template <class T>
void expect_like_python(const std::string& name, const T& record,
                        const Json& differences = Json::object()) {
  SCOPED_TRACE(name);
  const Json& expected = reference().at("cases").at(name);
  Json theirs = expected.contains("to_dict") ? expected["to_dict"] : expected["fields"];
  theirs.update(differences);
  const Json ours = to_json(to_dict(record, environment_of(expected)));
  EXPECT_EQ(without_extras(ours, theirs), theirs);
}

template <class T>
void expect_kwargs_like_python(const std::string& name, const T& record,
                               const Json& differences = Json::object()) {
  SCOPED_TRACE(name);
  const Json& expected = reference().at("cases").at(name);
  Json theirs = expected.at("to_kwargs");
  theirs.update(differences);
  const Json ours = to_json(to_kwargs(record, environment_of(expected)));
  EXPECT_EQ(without_extras(ours, theirs), theirs);
}

/// `f(environment)` throws an error of this kind; its message has the facts of Python's.
template <class E = ConfigError, class F>
void expect_refused(const std::string& name, F f) {
  SCOPED_TRACE(name);
  const Json& expected = reference().at("refusals").at(name);
  try {
    f(environment_of(expected));
    ADD_FAILURE() << "was accepted";
  } catch (const E& error) {
    for (const auto& fact : expected.at("facts")) {
      EXPECT_NE(std::string(error.what()).find(fact.get<std::string>()), std::string::npos)
          << "no " << fact << " in: " << error.what();
    }
  }
}

/// The message of the error that `f` throws.
template <class E = ConfigError, class F>
[[nodiscard]] std::string message_of(F f) {
  return test::message_of<E>(f);
}

}  // namespace accelerate::testing
