#pragma once

// The one version number: CMake, the wheel and the library all read this line.
#define FASTATTN_VERSION "0.1.0"
