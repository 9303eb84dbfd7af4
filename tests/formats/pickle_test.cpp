// Pickles: plain data and tensors are read, nothing is executed, and every attack has its error.
#include "formats/pickle.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "formats/pickle_value.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

using namespace std::string_literals;
using test::message_of;

std::string repr_of(const std::string& pickle) { return pickle_loads(pickle).repr(); }

std::string error_of(const std::string& pickle) {
  return message_of<FormatError>([&] { (void)pickle_loads(pickle, {.name = "p"}); });
}

/// Protocol 2, the body, and the end.
std::string framed(const std::string& body) { return "\x80\x02" + body + "."; }

// A persistent id, and the tensor function with everything in front of the offset.
const std::string kStorage =
    "(U\x07storagectorch\nFloatStorage\nU\x01"
    "0U\x03"
    "cpuK\x06tQ";
std::string tensor(const std::string& offset_sizes_strides, const std::string& storage = kStorage,
                   const std::string& metadata = "") {
  return framed("ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset_sizes_strides +
                "\x89"
                "ccollections\nOrderedDict\n)R" +
                metadata + "tR");
}

TEST(PickleLoads, ReadsTheOpcodesOfAllProtocols) {
  EXPECT_EQ(repr_of("\x80\x04\x95\x0c\0\0\0\0\0\0\0\x8c\x01"
                    "a\x94h\0\x86\x94K\x07\x85\x86."s),
            "(('a', 'a'), (7,))");
  EXPECT_EQ(repr_of(framed("(NK\x01M\0\x01J\xff\xff\xff\xff\x8a\x05\0^\xd0\xb2\0t"s)),
            "(None, 1, 256, -1, 3000000000)");
  EXPECT_EQ(repr_of(framed("\x8a\x00"s)), "0");
  EXPECT_EQ(repr_of(framed("\x8a\x01\xff")), "-1");
  EXPECT_EQ(repr_of(framed("\x8b\x02\0\0\0\x34\x12"s)), "4660");
  EXPECT_EQ(repr_of(framed("G\xbf\xf8\0\0\0\0\0\0"s)), "-1.5");
  EXPECT_EQ(repr_of("\x80\x03"
                    "C\x02\x00\xff."s),
            "b'\\x00\\xff'");
  EXPECT_EQ(repr_of("\x80\x05\x96\x01\0\0\0\0\0\0\0"
                    "a."s),
            "b'a'");
  EXPECT_EQ(repr_of("\x80\x04\x8f(K\x01\x90."), "builtins.set([1])");
  EXPECT_EQ(repr_of("\x80\x04(K\x01\x91."), "builtins.frozenset([1])");
  EXPECT_EQ(repr_of("\x80\x04\x8c\x01m\x8c\x01n\x93)\x81}\x8c\x01"
                    "aK\x01sb."),
            "m.n() with state {'a': 1}");
  EXPECT_EQ(repr_of("\x80\x04\x8c\x01m\x8c\x01n\x93)}\x8c\x01kK\x01s\x92."), "m.n(**{'k': 1})");
}

TEST(PickleLoads, ExecutesNothing) {
  EXPECT_EQ(repr_of(framed("cos\nsystem\n(X\x02\0\0\0idtR"s)), "os.system('id')");
}

TEST(PickleLoads, KeepsPairsOfKeysThatAreNoTextOrNumber) {
  EXPECT_EQ(repr_of(framed("}(K\x01\x85K\x02K\x03K\x04u")), "{(1,): 2, 3: 4}");
}

TEST(PickleLoads, RefusesAPickleThatIsCutOffAtAnyByte) {
  const auto whole = tensor("K\0K\x02K\x03\x86K\x03K\x01\x86"s);
  EXPECT_EQ(pickle_loads(whole).kind_name(), "stored tensor");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(error_of(whole.substr(0, size)), "nothing was thrown") << size;
  }
  EXPECT_EQ(error_of(whole.substr(0, 10)), "'p', byte 2: pickle: it ends in the middle of a name.");
  EXPECT_EQ(error_of(""), "'p', byte 0: pickle: it ends in the middle of an opcode.");
  EXPECT_EQ(error_of(whole + "x"), "'p', byte 121: pickle: 1 bytes follow its end.");
}

TEST(PickleLoads, RefusesOpcodesOutsideTheList) {
  EXPECT_EQ(error_of(framed("I1\n")),
            "'p', byte 2: pickle: the opcode 0x49 is not one that is read.");
  EXPECT_EQ(error_of(framed("i")), "'p', byte 2: pickle: the opcode 0x69 is not one that is read.");
  EXPECT_EQ(error_of("\x80\x06N."),
            "'p', byte 0: pickle: protocol 6 is not one of 2 to 5 at the start of a pickle.");
}

TEST(PickleLoads, RefusesLengthsBeyondTheEnd) {
  const auto beyond = "'p', byte 2: pickle: it ends in the middle of an opcode.";
  EXPECT_EQ(error_of(framed("X\xff\xff\xff\xff"
                            "a"s)),
            beyond);
  EXPECT_EQ(error_of(framed("\x8d\xff\xff\xff\xff\xff\xff\xff\xff"
                            "a"s)),
            beyond);
  EXPECT_EQ(error_of(framed("\x8e\xff\xff\xff\xff\xff\xff\xff\x7f"
                            "a"s)),
            beyond);
  EXPECT_EQ(error_of(framed("\x8b\xff\xff\xff\x7f"
                            "a"s)),
            "'p', byte 2: pickle: an integer has 2147483647 bytes; at most 255 are read.");
  EXPECT_EQ(error_of("\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN."s),
            "'p', byte 2: pickle: a frame is longer than the pickle.");
  EXPECT_EQ(error_of(framed("Nr\xff\xff\xff\x7f"s)),
            "'p', byte 3: pickle: the memo has no place 2147483647.");
}

TEST(PickleLoads, RefusesAMisusedStack) {
  const auto few = "'p', byte 2: pickle: an opcode takes more objects than there are.";
  EXPECT_EQ(error_of(framed("")), few);
  EXPECT_EQ(error_of(framed("\x86")), few);
  EXPECT_EQ(error_of(framed("q\0"s)), few);
  EXPECT_EQ(error_of(framed("t")),
            "'p', byte 2: pickle: an opcode needs a mark and there is none.");
  EXPECT_EQ(error_of(framed("NN")), "'p', byte 4: pickle: it ends with objects left over.");
  EXPECT_EQ(error_of(framed("h\x05")), "'p', byte 2: pickle: the memo has nothing at 5.");
  EXPECT_EQ(error_of(framed("NNa")), "'p', byte 4: pickle: items are appended to what is no list.");
  EXPECT_EQ(error_of(framed("NNNs")), "'p', byte 5: pickle: entries are set in what is no dict.");
  EXPECT_EQ(error_of(framed("}(Nu")), "'p', byte 5: pickle: a key has no value.");
  EXPECT_EQ(error_of(framed("N(N\x90")), "'p', byte 5: pickle: items are added to what is no set.");
  EXPECT_EQ(error_of(framed("NNb")), "'p', byte 4: pickle: a state is set on what is no object.");
  EXPECT_EQ(error_of(framed("N)R")), "'p', byte 4: pickle: what is called has no name.");
  EXPECT_EQ(error_of(framed("ca\nb\nNR")),
            "'p', byte 8: pickle: the arguments of a call are no tuple.");
  EXPECT_EQ(error_of(framed("ca\nb\n)RNbNb")),
            "'p', byte 12: pickle: the state of an object is set twice.");
  EXPECT_EQ(error_of(framed("NN\x93")), "'p', byte 4: pickle: a name is no text.");
}

TEST(PickleLoads, RefusesTextsThatAreNotUtf8) {
  EXPECT_EQ(error_of(framed("X\x01\0\0\0\xff"s)), "'p', byte 2: pickle: a text is not UTF-8.");
  EXPECT_EQ(error_of(framed("c\xff\nb\n")),
            "'p', byte 2: pickle: a name has 2 bytes or is not UTF-8; at most 4096 are read.");
  EXPECT_EQ(error_of(framed("c" + std::string(5000, 'a') + "\nb\n")),
            "'p', byte 2: pickle: a name has 5001 bytes or is not UTF-8; at most 4096 are read.");
}

TEST(PickleLoads, RefusesAKeyTwice) {
  EXPECT_EQ(error_of(framed("}(X\x01\0\0\0aNX\x01\0\0\0aNu"s)),
            "'p', byte 20: pickle: a dict has the key 'a' twice.");
  EXPECT_EQ(error_of(framed("ccollections\nOrderedDict\n)R(X\x01\0\0\0aNX\x01\0\0\0aNu"s)),
            "'p', byte 28: pickle: a dict has the key 'a' twice.");
  EXPECT_EQ(error_of(framed("}(\x88NK\x01Nu")),
            "'p', byte 11: pickle: a dict has the key 1 twice.");
}

TEST(PickleLoads, RefusesCycles) {
  EXPECT_EQ(error_of(framed("]q\0h\0a"s)), "'p', byte 9: pickle: a value contains itself.");
  EXPECT_EQ(error_of(framed("}q\0K\x01h\0s"s)), "'p', byte 11: pickle: a value contains itself.");
  EXPECT_EQ(error_of(framed("ca\nb\n)Rq\0h\0b"s)),
            "'p', byte 15: pickle: a value contains itself.");
}

TEST(PickleLoads, RefusesDeepNesting) {
  const std::size_t depth = 1'000'000;
  const auto deep = "values are nested deeper than 500 levels.";
  EXPECT_EQ(error_of(framed(std::string(depth, ']') + std::string(depth - 1, 'a'))),
            "'p', byte 2000002: pickle: "s + deep);
  EXPECT_EQ(error_of(framed(")" + std::string(depth, '\x85'))),
            "'p', byte 1000004: pickle: "s + deep);
  EXPECT_EQ(pickle_loads(framed(std::string(500, ']') + std::string(499, 'a'))).kind_name(),
            "list");
}

TEST(PickleLoads, RefusesSharedPartsThatWouldBeCopiedTooOften) {
  // Ten references a level, ten billion values after ten levels.
  std::string laughs = "]q\0"s;
  for (int level = 0; level < 10; ++level) {
    const char memo[] = {'h', static_cast<char>(level)};
    laughs += "](";
    for (int i = 0; i < 10; ++i) laughs.append(memo, 2);
    laughs += "eq";
    laughs.push_back(static_cast<char>(level + 1));
  }
  // What is not the last list stays on the stack: collect it.
  EXPECT_EQ(error_of(framed("(" + laughs + "t")),
            "'p', byte 258: pickle: copies of its shared parts would take too much memory.");
  // One long text, often.
  std::string texts = "X\x00\x00\x10\x00"s + std::string(1 << 20, 'a') + "q\0"s;
  for (int i = 0; i < 100'000; ++i) texts += "h\0"s;
  EXPECT_EQ(error_of(framed("(" + texts + "t")),
            "'p', byte 1248588: pickle: copies of its shared parts would take too much memory.");
  // One long name, often.
  const std::string name(4000, 'a');
  std::string names = "c" + name + "\nb\nq\0"s;
  for (int i = 0; i < 100'000; ++i) names += "h\0"s;
  EXPECT_EQ(error_of(framed("(" + names + "t")),
            "'p', byte 204011: pickle: copies of its shared parts would take too much memory.");
}

TEST(PickleLoads, ReadsAPickleFullOfSmallObjectsWithinItsBudget) {
  const std::size_t count = 1'000'000;
  EXPECT_EQ(pickle_loads(framed("](" + std::string(count, 'N') + "e")).as_list().size(), count);
  EXPECT_EQ(pickle_loads(framed("](" + std::string(count, '}') + "e")).as_list().size(), count);
}

#ifndef __SANITIZE_ADDRESS__  // it takes memory for itself
/// The most memory that a process takes to refuse a pickle, in MiB.
std::int64_t peak_of_refusal(const std::string& pickle) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const auto child = ::fork();
  if (child == 0) {
    try {
      (void)pickle_loads(pickle);
      ::_exit(1);
    } catch (const FormatError& error) {
      const auto refused = std::string_view(error.what()).ends_with("would take too much memory.");
      rusage used{};
      ::getrusage(RUSAGE_SELF, &used);
      const auto peak = static_cast<std::int64_t>(used.ru_maxrss) / 1024;
      ::_exit(refused && ::write(ends[1], &peak, sizeof(peak)) > 0 ? 0 : 2);
    }
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "it was not refused, or otherwise";
  std::int64_t peak = 0;
  if (status == 0) {
    EXPECT_EQ(::read(ends[0], &peak, sizeof(peak)), static_cast<ssize_t>(sizeof(peak)));
  }
  ::close(ends[0]);
  ::close(ends[1]);
  return peak;
}

TEST(PickleLoads, RefusesPicklesOfWhichMemoryFillsUp) {
  const std::size_t size = 16 << 20;
  const auto many = [&](const std::string& begin, std::string_view one) {
    std::string pickle = begin;
    while (pickle.size() < size) pickle += one;
    return framed(pickle + "e");
  };
  // Dicts, dicts with an entry, calls.
  for (const auto& pickle :
       {many("](", "}"), many("](", "}NNs"), many("](ca\nb\nq\0"s, "h\0)R"s)}) {
    EXPECT_LT(peak_of_refusal(pickle), 900) << pickle.substr(0, 40);
  }
}
#endif

TEST(PickleLoads, RefusesTensorsThatAreNotInsideTheirStorage) {
  EXPECT_EQ(error_of(tensor("K\x01K\x02K\x03\x86K\x03K\x01\x86")),
            "'p', byte 119: pickle: a tensor reaches to element 6 of storage '0', which has 6.");
  EXPECT_EQ(error_of(tensor("K\0K\x02\x85J\xff\xff\xff\xff\x85"s)),
            "'p', byte 118: pickle: a tensor has the stride -1.");
  EXPECT_EQ(error_of(tensor("K\0J\xff\xff\xff\xff\x85K\x01\x85"s)),
            "'p', byte 118: pickle: a tensor has the size -1.");
  EXPECT_EQ(error_of(tensor("J\xff\xff\xff\xffK\x01\x85K\x01\x85")),
            "'p', byte 118: pickle: a tensor has the offset -1.");
  EXPECT_EQ(error_of(tensor("K\0K\x02\x85K\x01K\x01\x86"s)),
            "'p', byte 117: pickle: a tensor has 1 sizes and 2 strides.");
  const auto huge = "\x8a\x08\0\0\0\0\0\0\0\x40"s;  // 2^62
  EXPECT_EQ(error_of(tensor("K\0"s + huge + huge + "\x86K\0K\0\x86"s)),
            "'p', byte 135: pickle: the sizes (4611686018427387904, 4611686018427387904) of a "
            "tensor are too large.");
  EXPECT_EQ(error_of(tensor("K\0K\0"s + huge + huge + "\x87K\0K\0K\0\x87"s)),
            "'p', byte 139: pickle: the sizes (0, 4611686018427387904, 4611686018427387904) of a "
            "tensor are too large.");
  EXPECT_EQ(
      error_of(tensor("K\0K\x02\x85"s + huge + "\x85")),
      "'p', byte 123: pickle: a tensor reaches to element 4611686018427387904 of storage '0', "
      "which has 6.");
  std::string ones = "(";
  for (int i = 0; i < 65; ++i) ones += "K\x01";
  EXPECT_EQ(error_of(tensor("K\0"s + ones + "t" + ones + "t")),
            "'p', byte 373: pickle: a tensor has 65 dimensions; at most 64 are read.");
  EXPECT_EQ(error_of(tensor("NK\x01\x85K\x01\x85")),
            "'p', byte 114: pickle: the arguments of torch._utils._rebuild_tensor_v2 are not those "
            "of a tensor.");
}

TEST(PickleLoads, ReadsTheFlagsOfViewsAndRefusesOtherMetadata) {
  const auto with = [](const std::string& metadata) {
    return tensor("K\0K\x02\x85K\x01\x85"s, kStorage, metadata);
  };
  const Value negated = pickle_loads(with("}U\x03neg\x88s"));
  EXPECT_EQ(negated.repr(), "tensor(..., size=(2,), dtype=torch.float32, negated)");
  EXPECT_FALSE(negated == pickle_loads(with("}U\x03neg\x89s")));
  EXPECT_EQ(pickle_loads(pickle_dumps(negated)), negated);
  EXPECT_EQ(error_of(with("}U\x04"
                          "conj\x88s")),
            "'p', byte 124: pickle: a tensor of dtype torch.float32 is conjugated.");
  EXPECT_EQ(error_of(with("}U\x04wave\x88s")),
            "'p', byte 124: pickle: a tensor has the metadata 'wave': True, which is not read.");
  EXPECT_EQ(error_of(with("K\x01")), "'p', byte 117: pickle: the metadata of a tensor is int.");
}

TEST(PickleLoads, RefusesStoragesThatAreNone) {
  EXPECT_EQ(error_of(framed("NQ")),
            "'p', byte 3: pickle: a persistent id is not ('storage', type, key, location, numel).");
  EXPECT_EQ(error_of(framed("(U\x07storagectorch\nQUInt8Storage\nU\x01"
                            "0U\x03"
                            "cpuK\x06tQ")),
            "'p', byte 44: pickle: a storage is of class torch.QUInt8Storage, which is not read.");
  EXPECT_EQ(error_of(framed("(U\x07storagectorch\nFloatStorage\nU\x01"
                            "0U\x03"
                            "cpuJ\xff\xff\xff\xfftQ")),
            "'p', byte 46: pickle: a storage has -1 elements.");
  EXPECT_EQ(error_of(framed("(U\x07storagectorch\nFloatStorage\nU\x01"
                            "0U\x03"
                            "cpu\x8a\x08\0\0\0\0\0\0\0\x40tQ"s)),
            "'p', byte 51: pickle: a storage has 4611686018427387904 elements.");
  EXPECT_EQ(error_of(framed("(U\x07storagectorch\nFloatStorage\nU\x41" + std::string(65, '0') +
                            "U\x03"
                            "cpuK\x06tQ")),
            "'p', byte 107: pickle: the key or location of a storage has 65 bytes; at most 64 are "
            "read.");
}

TEST(PickleLoads, RefusesPicklesBeyondTheLimit) {
  EXPECT_EQ(message_of<FormatError>(
                [] { (void)pickle_loads(framed("N"), {.name = "p", .max_bytes = 3}); }),
            "'p', byte 0: pickle: it has 4 bytes; at most 3 are read.");
}

TEST(PickleDumps, WritesTheOpcodesOfTheSpecification) {
  EXPECT_EQ(pickle_dumps(Value(3000000000)), "\x80\x02\x8a\x05\0^\xd0\xb2\0."s);
  EXPECT_EQ(pickle_dumps(Value(-1)), "\x80\x02J\xff\xff\xff\xff.");
  EXPECT_EQ(pickle_dumps(Value(1.5)), "\x80\x02G\x3f\xf8\0\0\0\0\0\0."s);
  EXPECT_EQ(pickle_dumps(Value::Dict{{"w", Value::tuple({1, true})}}),
            "\x80\x02}(X\x01\0\0\0wq\0K\x01\x88\x86u."s);
  EXPECT_EQ(pickle_dumps(Value::bytes("\xff")),
            "\x80\x02"
            "c_codecs\nencode\nq\0X\x02\0\0\0\xc3\xbfq\x01X\x06\0\0\0latin1q\x02\x86R."s);
}

TEST(PickleDumps, IsReadAsTheSameValue) {
  const Value value = Value::Dict{
      {"ints", Value::List{0, 255, 256, 65536, -129, INT64_MAX, INT64_MIN}},
      {"doubles", Value::List{0.0, 1e300, -0.1}},
      {"texts", Value::List{"", "a", "a", "\xc3\xa4"}},
      {"bytes", Value::bytes("\0\xff"s)},
      {"nested",
       Value::Dict{{1, Value::tuple({})}, {2, Value::tuple({1})}, {3, Value::List{nullptr}}}},
      {"long", Value::tuple({1, 2, 3, 4})}};
  EXPECT_EQ(pickle_loads(pickle_dumps(value)), value);
}

TEST(PickleDumps, MakesObjectsInTheWayInWhichTheyWereMade) {
  // By __new__, whose class may need arguments for __init__, and by a call.
  for (const auto& pickle : {"\x80\x02"
                             "cmodule\nName\nq\0)\x81}(X\x01\0\0\0aq\x01K\x01ub."s,
                             "\x80\x02"
                             "cmodule\nName\nq\0K\x01\x85R."s}) {
    EXPECT_EQ(pickle_dumps(pickle_loads(pickle)), pickle);
  }
}

TEST(PickleDumps, WritesASharedTensorOnce) {
  const Value one = pickle_loads(tensor("K\0K\x02\x85K\x01\x85"s));
  const auto pickle = pickle_dumps(Value::list({one, one}));
  const Value back = pickle_loads(pickle);
  EXPECT_EQ(back.as_list()[0].leaf(), back.as_list()[1].leaf());
  EXPECT_TRUE(back.as_list()[0] == one);
}

TEST(PickleDumps, RefusesTextsThatAreNotUtf8) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)pickle_dumps(Value("a\xff")); }),
            "A text to be saved is not UTF-8: 'a\\udcff'. Save it as bytes.");
}

TEST(PickleDumps, RefusesValuesThatAreTooDeep) {
  Value value;
  for (int i = 0; i < 600; ++i) value = Value::list({std::move(value)});
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)pickle_dumps(value); }),
            "A value to be saved is nested deeper than 500 levels.");
}

}  // namespace
}  // namespace accelerate::detail::formats
