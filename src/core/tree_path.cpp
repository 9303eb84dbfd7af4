#include "accelerate/value/path.h"

namespace accelerate {

std::string TreePath::str() const {
  std::string text = parent_ == nullptr ? std::string() : parent_->str();
  switch (step_) {
    case Step::kRoot:
      break;
    case Step::kNumber:
      text += '[' + std::to_string(number_) + ']';
      break;
    case Step::kKey:
      text += '[' + ValueKeyView(name_).repr() + ']';
      break;
    case Step::kMember:
      text += '.';
      text += name_;
      break;
  }
  return text;
}

}  // namespace accelerate
