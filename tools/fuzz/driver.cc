// Calls handlers of the native library as XLA does. Every array has its own block of memory of exactly its size, so a
// sanitizer reports an access outside of it. Tasks run on threads that a sanitizer knows, so it reports races.

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

constexpr int kThreads = 4;
constexpr size_t kAlignment = 64;  // alignment of arrays in XLA

// The pool is never destroyed, because a task may run after the call that scheduled it has returned.
class Pool {
 public:
  Pool() {
    for (int k = 0; k < kThreads; ++k) std::thread([this] { Serve(); }).detach();
  }

  void Schedule(XLA_FFI_Task* task, void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({task, data});
    has_tasks_.notify_one();
  }

 private:
  struct Task {
    XLA_FFI_Task* run;
    void* data;
  };

  void Serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      has_tasks_.wait(lock, [this] { return !tasks_.empty(); });
      const Task task = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      task.run(task.data);
    }
  }

  std::mutex mutex_;
  std::condition_variable has_tasks_;
  std::deque<Task> tasks_;
};

XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  static Pool* const pool = new Pool;
  pool->Schedule(args->task, args->data);
  return nullptr;
}

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = kThreads;
  return nullptr;
}

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
void GetMessage(XLA_FFI_Error_GetMessage_Args* args) { args->message = args->error->message.c_str(); }
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_GetMessage = GetMessage;
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_ThreadPool_Schedule = Schedule;
  api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
  return api;
}

}  // namespace

// direct_calls.py has the same structures.
struct Array {
  int32_t dtype;
  int32_t operand;  // index of the operand that shares memory with a result, or -1
  int64_t rank;
  int64_t* dims;
  int64_t num_bytes;
  void* data;
};

struct Attribute {
  const char* name;
  int32_t is_array;
  int32_t dtype;
  int64_t size;
  void* data;
};

// Calls a handler. If the handler refuses the call, returns false and writes its message into `complaint`. Attributes
// must be in the order of their names.
extern "C" bool fuzz_call(XLA_FFI_Handler* handler, Array* operands, int64_t num_operands, Array* results,
                          int64_t num_results, Attribute* attributes, int64_t num_attributes, char* complaint,
                          int64_t complaint_size) {
  static const XLA_FFI_Api api = MakeApi();
  std::vector<void*> blocks, buffer_list;
  std::vector<XLA_FFI_Buffer> buffers(num_operands + num_results);
  const auto own_block = [&](int64_t num_bytes) {
    void* block = nullptr;
    if (num_bytes > 0 && posix_memalign(&block, kAlignment, num_bytes) != 0) std::abort();
    blocks.push_back(block);
    return block;
  };
  for (int64_t k = 0; k < num_operands + num_results; ++k) {
    const bool is_operand = k < num_operands;
    const Array& array = is_operand ? operands[k] : results[k - num_operands];
    void* data;
    if (!is_operand && array.operand >= 0) {
      data = buffers[array.operand].data;
    } else {
      data = own_block(array.num_bytes);
      if (array.num_bytes > 0 && is_operand) std::memcpy(data, array.data, array.num_bytes);
      if (array.num_bytes > 0 && !is_operand) std::memset(data, 0xa5, array.num_bytes);
    }
    const auto dtype = static_cast<XLA_FFI_DataType>(array.dtype);
    buffers[k] = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, data, array.rank, array.dims};
    buffer_list.push_back(&buffers[k]);
  }
  std::vector<XLA_FFI_Scalar> scalars(num_attributes);
  std::vector<XLA_FFI_Array> arrays(num_attributes);
  std::vector<XLA_FFI_ByteSpan> names(num_attributes);
  std::vector<XLA_FFI_ByteSpan*> name_list;
  std::vector<void*> attribute_list;
  std::vector<XLA_FFI_AttrType> attribute_types;
  for (int64_t k = 0; k < num_attributes; ++k) {
    const Attribute& from = attributes[k];
    const auto dtype = static_cast<XLA_FFI_DataType>(from.dtype);
    names[k] = {from.name, std::strlen(from.name)};
    scalars[k] = {dtype, from.data};
    arrays[k] = {dtype, static_cast<size_t>(from.size), from.data};
    name_list.push_back(&names[k]);
    attribute_list.push_back(from.is_array ? static_cast<void*>(&arrays[k]) : static_cast<void*>(&scalars[k]));
    attribute_types.push_back(from.is_array ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR);
  }
  std::vector<XLA_FFI_ArgType> operand_types(num_operands, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(num_results, XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, num_operands, operand_types.data(), buffer_list.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, num_results, result_types.data(), buffer_list.data() + num_operands};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, num_attributes, attribute_types.data(), name_list.data(),
                 attribute_list.data()};
  XLA_FFI_Error* const error = handler(&frame);
  for (int64_t k = 0; k < num_results && error == nullptr; ++k) {
    if (results[k].num_bytes > 0) std::memcpy(results[k].data, buffers[num_operands + k].data, results[k].num_bytes);
  }
  for (void* block : blocks) std::free(block);
  if (error == nullptr) return true;
  std::strncpy(complaint, error->message.c_str(), complaint_size - 1);
  delete error;
  return false;
}
