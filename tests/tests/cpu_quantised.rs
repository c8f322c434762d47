//! The suite on the CPU backend over quantised weights.

mod backends;

use backends::quantised::Quantised;
use backends::{Cpu, Kind};
use flash_sampling_conformance::suite;
use flash_sampling_core::DType;
use flash_sampling_cpu::Isa;

fn over(kind: Kind, isa: Isa, dtype: DType) -> Quantised<Cpu> {
    Quantised { inner: Cpu::new(kind, isa), dtype }
}

/// The fastest instruction set for quantised weights.
fn widest(dtype: DType) -> Quantised<Cpu> {
    over(Kind::Tiled, Isa::best_for(dtype, DType::BF16), dtype)
}

suite!(tiled_q8_0, widest(DType::Q8_0));
suite!(tiled_q4_0, widest(DType::Q4_0));
suite!(tiled_q4_k, widest(DType::Q4_K));
suite!(tiled_q5_k, widest(DType::Q5_K));
suite!(tiled_q6_k, widest(DType::Q6_K));
suite!(tiled_portable_q6_k, over(Kind::Tiled, Isa::Portable, DType::Q6_K));
suite!(stream_portable_q8_0, over(Kind::Stream, Isa::Portable, DType::Q8_0));
