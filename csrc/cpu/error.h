// How the C interface reports errors.
#pragma once

#include <cstdarg>

namespace pagemill {

// Records a printf-style message for pagemill_last_error() and returns 1.
[[gnu::format(printf, 1, 2)]] int fail(const char* format, ...);

}  // namespace pagemill
