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

suite!(grouped_portable, Cpu::new(Kind::Grouped, Isa::Portable));
suite!(grouped_avx2, Cpu::new(Kind::Grouped, Isa::Avx2));
suite!(grouped_avx512, Cpu::new(Kind::Grouped, Isa::Avx512));
suite!(grouped_avx512bf16, Cpu::new(Kind::Grouped, Isa::Avx512Bf16));
suite!(grouped_amx, Cpu::new(Kind::Grouped, Isa::Amx));

suite!(grouped_reuse_portable, Cpu::new(Kind::GroupedReuse, Isa::Portable));
suite!(grouped_reuse_avx2, Cpu::new(Kind::GroupedReuse, Isa::Avx2));
suite!(grouped_reuse_avx512, Cpu::new(Kind::GroupedReuse, Isa::Avx512));
suite!(grouped_reuse_avx512bf16, Cpu::new(Kind::GroupedReuse, Isa::Avx512Bf16));
suite!(grouped_reuse_amx, Cpu::new(Kind::GroupedReuse, Isa::Amx));

suite!(online_portable, Cpu::new(Kind::Online, Isa::Portable));
suite!(online_avx2, Cpu::new(Kind::Online, Isa::Avx2));
suite!(online_avx512, Cpu::new(Kind::Online, Isa::Avx512));
suite!(online_avx512bf16, Cpu::new(Kind::Online, Isa::Avx512Bf16));
suite!(online_amx, Cpu::new(Kind::Online, Isa::Amx));
