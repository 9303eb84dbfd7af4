// src/formats/pickle_opcodes.h - the opcodes that are read; those of protocol 2 are also written.
#pragma once

#include <cstdint>

namespace accelerate::detail::formats {

enum class Opcode : std::uint8_t {
  kMark = 0x28,
  kEmptyTuple = 0x29,
  kStop = 0x2e,
  kBinBytes = 0x42,
  kShortBinBytes = 0x43,
  kBinFloat = 0x47,
  kBinInt = 0x4a,
  kBinInt1 = 0x4b,
  kBinInt2 = 0x4d,
  kNone = 0x4e,
  kBinPersId = 0x51,
  kReduce = 0x52,
  kShortBinString = 0x55,
  kBinUnicode = 0x58,
  kEmptyList = 0x5d,
  kAppend = 0x61,
  kBuild = 0x62,
  kGlobal = 0x63,
  kAppends = 0x65,
  kBinGet = 0x68,
  kLongBinGet = 0x6a,
  kBinPut = 0x71,
  kLongBinPut = 0x72,
  kSetItem = 0x73,
  kTuple = 0x74,
  kSetItems = 0x75,
  kEmptyDict = 0x7d,
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjEx = 0x92,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
};

}  // namespace accelerate::detail::formats
