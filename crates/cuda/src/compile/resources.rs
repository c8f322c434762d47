//! The resources that a kernel needs on a multiprocessor, from the assembler's report.

/// The resources of one function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resources {
    /// The function's name in the machine code.
    pub function: String,
    /// Whether the host launches the function; otherwise another function calls it.
    pub entry: bool,
    /// 32-bit registers per thread; 0 for functions that are not entries.
    pub registers: u32,
    /// Static shared memory per block, in bytes.
    pub shared: u32,
    /// Local memory per thread, in bytes: arrays with run-time indices, and spilled registers.
    pub stack: u32,
    /// Bytes that spilled registers write.
    pub spill_stores: u32,
    /// Bytes that spilled registers read.
    pub spill_loads: u32,
}

/// Parses the functions from a compiler's log.
pub(crate) fn of_log(log: &str) -> Vec<Resources> {
    let mut entries: Vec<&str> = Vec::new();
    let mut found: Vec<Resources> = Vec::new();
    // A "Used" line belongs to the last announced entry.
    let mut entry = None;
    for line in log.lines() {
        if let Some(name) = line.split("Compiling entry function '").nth(1).and_then(|rest| rest.split('\'').next()) {
            entries.push(name);
            entry = Some(name);
        } else if let Some(name) = line.split("Function properties for ").nth(1) {
            found.push(Resources { function: name.trim().into(), ..Resources::default() });
        } else if line.contains(" bytes stack frame") {
            if let Some(last) = found.last_mut() {
                last.stack = number_before(line, " bytes stack frame");
                last.spill_stores = number_before(line, " bytes spill stores");
                last.spill_loads = number_before(line, " bytes spill loads");
            }
        } else if line.contains(" registers")
            && let Some(of_entry) = found.iter_mut().find(|f| Some(&*f.function) == entry)
        {
            of_entry.registers = number_before(line, " registers");
            of_entry.shared = number_before(line, " bytes smem");
            of_entry.stack = of_entry.stack.max(number_before(line, " bytes lmem"));
        }
    }
    for function in &mut found {
        function.entry = entries.contains(&&*function.function);
    }
    found
}

/// Returns the number before `unit`; 0 if there is none.
fn number_before(line: &str, unit: &str) -> u32 {
    let digits = line.split(unit).next().filter(|before| before.len() < line.len()).unwrap_or_default();
    let start = digits.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    digits[start..].parse().unwrap_or(0)
}

/// The assembler's messages about serialised tensor-core products.
const WGMMA: [&str; 2] = ["wgmma.mma_async instructions are serialized", "wgmma.wait_group is injected"];

/// Describes the faults of a hot kernel; empty if there are none. `functions` are the functions of the log.
pub(crate) fn faults(functions: &[Resources], log: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if !functions.iter().any(|f| f.entry && f.registers > 0) {
        faults.push("the compiler's log tells nothing of registers and spills".to_owned());
    }
    for Resources { function, stack, spill_stores, spill_loads, .. } in functions {
        if stack + spill_stores + spill_loads > 0 {
            faults.push(format!(
                "{function} has {stack} bytes of local memory, spills {spill_stores} bytes and reads {spill_loads} back"
            ));
        }
    }
    faults.extend(log.lines().filter(|line| WGMMA.iter().any(|word| line.contains(word))).map(|l| l.trim().to_owned()));
    faults
}

/// Returns the warning lines of a log.
pub(crate) fn warnings(log: &str) -> impl Iterator<Item = String> {
    let warns = |line: &&str| line.contains(": warning") || line.contains("ptxas warning");
    log.lines().filter(warns).map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::nvrtc;

    const LOG: &str = "\
ptxas info    : 8 bytes gmem, 24 bytes cmem[3]
ptxas info    : Compiling entry function 'tidy' for 'sm_90a'
ptxas info    : Function properties for tidy
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1032 bytes smem
ptxas info    : Compile time = 8.456 ms
ptxas info    : Compiling entry function 'untidy' for 'sm_90a'
ptxas info    : Function properties for _Z6calledv
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for untidy
    288 bytes stack frame, 556 bytes spill stores, 576 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 288 bytes cumulative stack size
";

    #[test]
    fn the_assembler_s_report_is_read() {
        let found = of_log(LOG);
        let names: Vec<_> = found.iter().map(|f| (&*f.function, f.entry, f.registers, f.shared)).collect();
        assert_eq!(names, [("tidy", true, 168, 1032), ("_Z6calledv", false, 0, 0), ("untidy", true, 64, 0)]);
        assert_eq!((found[2].stack, found[2].spill_stores, found[2].spill_loads), (288, 556, 576));
        let faults = faults(&found, LOG);
        assert_eq!(faults.len(), 1);
        assert!(faults[0].starts_with("untidy has 288"), "{faults:?}");
    }

    #[test]
    fn silence_is_a_fault_and_so_is_serialised_wgmma() {
        assert_eq!(faults(&[], "").len(), 1);
        let tidy = &LOG[..LOG.find("ptxas info    : Compiling entry function 'untidy'").unwrap()];
        assert_eq!(faults(&of_log(tidy), tidy), [""; 0]);
        let line = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized";
        let log = format!("{tidy}{line} due to ill formed pipeline stage in the function 'tidy'\n");
        assert_eq!(faults(&of_log(&log), &log).len(), 1);
        let unused = format!("{tidy}x.cu(3): warning #177-D: variable \"x\" was declared but never referenced\n");
        assert_eq!((warnings(&unused).count(), faults(&of_log(&unused), &unused).len()), (1, 0));
    }

    /// The negative control of CI's guard: two kernels that it must reject, in the report of this machine's compiler.
    #[test]
    fn kernels_that_spill_or_index_local_arrays_are_refused() {
        const SPILLS: &str = include_str!("../../kernels/tests/controls/spills.cu");
        const SERIALISES: &str = include_str!("../../kernels/tests/controls/serialises.cu");
        if !nvrtc::tests::runs(1) {
            return;
        }
        let judged = |unit: &str, architecture: &str| {
            let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".into()];
            let compiled = nvrtc::reported("a control", unit, &options).unwrap();
            faults(&of_log(&compiled.log), &compiled.log)
        };
        for architecture in ["sm_80", "sm_90a", "sm_100a", "sm_120a"] {
            let faults = judged(SPILLS, architecture);
            assert_eq!(faults.len(), 2, "{faults:?}");
            assert!(faults.iter().any(|f| f.starts_with("spills has") && !f.contains("spills 0 bytes")), "{faults:?}");
            assert!(faults.iter().any(|f| f.starts_with("indexes has 256 bytes")), "{faults:?}");
        }
        let faults = judged(SERIALISES, "sm_90a");
        assert!(faults.iter().any(|fault| fault.contains("serialized")), "{faults:?}");
    }
}
