//! The suite on the CPU backend: every variant on every instruction set, and what only this backend promises.

mod backends;

use backends::{Cpu, Kind};
use flash_sampling_conformance::suite;
use flash_sampling_cpu::Isa;

suite!(tiled_portable, Cpu::new(Kind::Tiled, Isa::Portable));
suite!(tiled_avx2, Cpu::new(Kind::Tiled, Isa::Avx2));
suite!(tiled_avx512, Cpu::new(Kind::Tiled, Isa::Avx512));
suite!(tiled_avx512bf16, Cpu::new(Kind::Tiled, Isa::Avx512Bf16));
suite!(tiled_amx, Cpu::new(Kind::Tiled, Isa::Amx));

suite!(standalone_portable, Cpu::new(Kind::Standalone, Isa::Portable));
suite!(standalone_avx2, Cpu::new(Kind::Standalone, Isa::Avx2));
suite!(standalone_avx512, Cpu::new(Kind::Standalone, Isa::Avx512));
