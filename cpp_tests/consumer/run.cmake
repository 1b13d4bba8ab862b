# Installs this build into a fresh prefix, then configures, builds and runs the consumer against it:
#   cmake -D BUILD_DIR=... -D WORK_DIR=... -D CONFIG=... -D GENERATOR=... -D MAKE_PROGRAM=...
#         -D CXX_COMPILER=... -D CXX_FLAGS=... -P run.cmake
cmake_minimum_required(VERSION 3.26)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
foreach(component IN ITEMS runtime devel)
  run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${WORK_DIR}/moved-from"
    --config "${CONFIG}" --component ${component})
endforeach()
# An install tree must be relocatable.
file(RENAME "${WORK_DIR}/moved-from" "${WORK_DIR}/prefix")

run("${CMAKE_COMMAND}" -G "${GENERATOR}" --no-warn-unused-cli "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
  -S "${CMAKE_CURRENT_LIST_DIR}" -B "${WORK_DIR}/build"
  "-DCMAKE_BUILD_TYPE=${CONFIG}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}"
  "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}"
  "-DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix"
  # A C++ user needs neither.
  -DCMAKE_DISABLE_FIND_PACKAGE_Python=ON -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON)
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build" --config "${CONFIG}")
find_program(consumer consumer
  PATHS "${WORK_DIR}/build" "${WORK_DIR}/build/${CONFIG}" NO_DEFAULT_PATH NO_CACHE REQUIRED)
run("${consumer}")
