//! Tests of headers and kernels on the processor. All are modules of one program, so that the C++ compiler, which takes most
//! of the time, runs on every processor.

mod draws;
mod emulated;
mod fused_hopper;
mod headers;
mod inputs;
mod lists;
mod quantised_weights;
mod row_logprobs;
mod row_summary;
mod stored_scan;
