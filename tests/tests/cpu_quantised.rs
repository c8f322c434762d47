//! The suite on the CPU backend over quantised weights.

mod backends;

use backends::quantised::{Fault, Quantised};
use backends::{Cpu, Kind};
use flash_sampling_conformance::{laws, suite};
use flash_sampling_core::DType;
use flash_sampling_cpu::Isa;

fn over(kind: Kind, isa: Isa, dtype: DType) -> Quantised<Cpu> {
    Quantised::new(Cpu::new(kind, isa), dtype)
}

/// The instruction set that a sampler takes by default, with its kernels for quantised weights and for bounds.
fn widest(dtype: DType) -> Quantised<Cpu> {
    over(Kind::Tiled, Isa::best_for(DType::BF16, DType::BF16), dtype)
}

/// One scale for the whole weight.
const TENSOR: [usize; 2] = [usize::MAX; 2];
/// One scale for 128 rows and columns.
const BLOCK: [usize; 2] = [128; 2];

suite!(tiled_q8_0, widest(DType::Q8_0));
suite!(tiled_q4_0, widest(DType::Q4_0));
suite!(tiled_q4_k, widest(DType::Q4_K));
suite!(tiled_q5_k, widest(DType::Q5_K));
suite!(tiled_q6_k, widest(DType::Q6_K));
suite!(tiled_portable_q6_k, over(Kind::Tiled, Isa::Portable, DType::Q6_K));
suite!(stream_portable_q8_0, over(Kind::Stream, Isa::Portable, DType::Q8_0));

suite!(tiled_iq4_nl, widest(DType::IQ4_NL));
suite!(tiled_mxfp4, widest(DType::MXFP4));
suite!(tiled_i8_row, widest(DType::I8));
suite!(tiled_i8_tensor, widest(DType::I8).with_scale_block(TENSOR));
suite!(tiled_i8_block, widest(DType::I8).with_scale_block(BLOCK));
suite!(tiled_f8_row, widest(DType::F8_E4M3));
suite!(tiled_f8_tensor, widest(DType::F8_E4M3).with_scale_block(TENSOR));
suite!(tiled_f8_block, widest(DType::F8_E4M3).with_scale_block(BLOCK));

/// The negative controls.
#[test]
fn the_suite_rejects_wrong_scales_and_rounded_hidden_states_of_every_type() {
    let types = DType::ALL.into_iter().filter(|dtype| !dtype.is_float());
    let factories = types.flat_map(|dtype| {
        let blocks: &[Option<[usize; 2]>] =
            if dtype.is_scaled() { &[None, Some(TENSOR), Some(BLOCK)] } else { &[None] };
        blocks.iter().map(move |block| block.map_or(widest(dtype), |block| widest(dtype).with_scale_block(block)))
    });
    for factory in factories {
        for (fault, law) in [
            (Fault::DoubledScale, "exact_inputs_have_the_reference_bits"),
            (Fault::RoundedHidden, "real_inputs_stay_within_the_rounding_bound"),
        ] {
            let law = laws::named(law).expect("a law of the table");
            let outcome = law.check(&suite::trial(&factory.with_fault(fault)));
            assert!(outcome.is_err(), "{fault:?} is not rejected: {}", outcome.unwrap());
        }
    }
}
