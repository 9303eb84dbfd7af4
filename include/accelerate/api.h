// accelerate/api.h - marks what libaccelerate.so exports.
//
// Everything is compiled with hidden visibility; only names with this mark can be linked against.
#pragma once

#define ACCELERATE_API __attribute__((visibility("default")))
