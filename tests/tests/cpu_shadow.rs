//! The suite on the CPU backend and on the reference, over heads with a shadow.

mod backends;

use backends::referee::Referee;
use backends::shadow::WithShadow;
use backends::shadow_draws::{CallSize, draws_have_equal_bits};
use backends::{Cpu, Kind};
use flash_sampling_conformance::problem::Size;
use flash_sampling_conformance::suite;
use flash_sampling_core::DType;
use flash_sampling_cpu::Isa;

suite!(tiled, WithShadow(Cpu::new(Kind::Tiled, Isa::best_for(DType::BF16, DType::BF16))));
suite!(tiled_portable, WithShadow(Cpu::new(Kind::Tiled, Isa::Portable)));
suite!(reference, WithShadow(Referee("tiled")));

#[test]
fn a_million_draws_by_a_shadow_have_equal_bits() {
    // With AVX2 alone, only calls of one row read the shadow.
    let sizes = [(1, 64), (1, 48), (1, 64), (1, 64), (1, 64), (1, 64), (4, 16)];
    let calls = sizes.map(|(rows, draws)| CallSize { rows, draws });
    let isa = Isa::best_for(DType::BF16, DType::BF16);
    draws_have_equal_bits(Cpu::new(Kind::Tiled, isa).with_threads(1), Size::new(16, 2560, 64), &calls);
}
