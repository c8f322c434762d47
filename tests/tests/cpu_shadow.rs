//! The suite on the CPU backend and on the reference, over heads with a shadow.

mod backends;

use backends::referee::Referee;
use backends::shadow::WithShadow;
use backends::{Cpu, Kind};
use flash_sampling_conformance::suite;
use flash_sampling_core::DType;
use flash_sampling_cpu::Isa;

suite!(tiled, WithShadow(Cpu::new(Kind::Tiled, Isa::best_for(DType::BF16, DType::BF16))));
suite!(tiled_portable, WithShadow(Cpu::new(Kind::Tiled, Isa::Portable)));
suite!(grouped_reuse, WithShadow(Cpu::new(Kind::GroupedReuse, Isa::best_for(DType::BF16, DType::BF16))));
suite!(reference, WithShadow(Referee("tiled")));
