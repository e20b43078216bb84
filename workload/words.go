package workload

import (
	"regexp"
	"slices"
	"strings"
)

// Names are made up, so that no model knows anything about them, and every
// two differ in two letters or more, so that one damaged token can't turn one
// name into another. Carriers begin with a vowel and parcels don't. The lists
// are part of what Version versions.
var (
	parcelNames = strings.Fields(`
bafor balda banir bapol bardu baro batu bave bazi bekul belal bendi beno bere berka besti beva bevil
bifir bipor birki birve bistu bogi bogor bokel bolti bolvu bonon bope bordi bormu bovo bozu bufi
bugen bulu bume bundo burva butur buvol buza daki dalmu dalo danan danda danor daren darne davel
davon defe delor delul delve depal depo derda detin devu dibar dimal dinde dinka dinti dipil divi
dizer dogil dolvo dondu dopi doton dubir dubul duge duku duldi dulmo dumil dunun durvi dusti duva
falto fama farmo fastu fazil febel feki fenda fenko fenu fepil fermu ferun fervi filde filur fimar
fime fimon finku firko fizel fobi fogu foke fomun forde formi forur forvo fotan foval fozin fure
furul fuzar gafi gakar gakon galmo galtu gandi ganer gano gare garir garni gavur geba gebin gedun
gefal geme geni genol germo gerva getul gikan gilal gildo gindu giren girke gobil godol golme gomo
gondo gonka gora gordu goron gukul gule gulmi gulol gupel gurdi gurve gutal kafal kafo kalva kamer
kanti karur karve kavir kaze keda kefan kegar kele kepen kernu keto kezel kibe kidu kigin kima kirde
kirul kizar kombu kondi kontu korki kubel kubi kufen kulma kupar kurka kurne kutil lafel lagan lagi
lamba lamu lapir larde larnu lazol leber lebon legol legu lemar lepan lepi lesto leta ligir likil
likon lipin liru liti liva lodo logar lokun lomel loni lopul lorve loza luba lubil ludun lufir lugin
lumbi lunde lunko luren lutul mado madun malil mazon menal menki mepu meste metan mevo mida midin
midur miku mildi milta mipar mitil miver mizi moder mokan mokur mola morku morna movun mufor mundu
munto murni mustu nade nalu napi napor napun nardo narna narol nedan nedor nefu neldu nelun nerdi
nerku neten nilvo nimu niza noba nodel nodi nofo nole noral norin norke nupol nurki nurmu nurvo
nusto nuta nutel nuton nuvi pali palte palun parvu patal patin pavor pefel pegun pelma pemu permi
peve pezur pidi pifol pigon piker pilvu pinul pirin pirur pitor pivo pizu pode pofal pofi pogir
pomba ponan postu potar pufa pugor pulva pumbo puno puntu purnu radel ragu rakin rana rati redi rege
regin regor reku reldo relte repa retir revar ribin ribu riful rilda rilmo rimi riner rinil rino
rinta rolma rolto rolvi romur ronen ronku ronul rotu rozal roze rudal rugon rulil ruma rupun rute
taden tador talde talmi tanu tarva tasto tavil tebo tede tedul telmu telti terel terir terki terma
tervo tevi tider tidol tifur tila timel tindi tofil topir torno toru tova tufun tugu tulo tunol
tuvor tuzal vabir vabo vanka vante varvo vatol vebu vefi vegur velde vema vembe venar vene verna
vezon vibi vilme vimo vinel virne vitu vofen volon vome vonal vonki vonu vukan vuki vukol vumul
vunir vupin vura vurdo vurku vuste zadan zafur zagul zakel zakor zaldu zalma zani zape zarvi zegon
zeke zekol zelmi zemba zeril zerko zerve zife zigi zilu ziman zimbu zinur zirni zitin zito zivar
zivil zobo zolmu zonko zonta zopu zorar zoste zugal zuko zulin zumor zunul zurer zurme
`)
	carrierNames = strings.Fields(`
altun alven andur ardos arge arkas arko arnor askus ebbas ebbo elki embos erdes erdo ergas ermer
ermun erne eskir esku ettas ibber ibbi ilma iltan iltu impa inke inkis irden irgun irmes irmor irvar
irvon itton oldo olkor olvur ompan ompi ompus ondis ontin ordus ormo osko ubba ubbir ulku ulmen
ulvas umbun unka untan untos urdan urga urven urvu ustus uttes uttin
`)
)

// ParcelNames returns the names that parcels and lockers are made of.
func ParcelNames() []string { return slices.Clone(parcelNames) }

// CarrierNames returns the names of carriers.
func CarrierNames() []string { return slices.Clone(carrierNames) }

// Words returns, sorted, every word that the texts of the agent workload can
// hold beside names, codes, docks and canaries.
func Words() []string {
	texts := []string{
		textSystem, textSystemText, textFact, textShipped, textMoved, textDone, textFailed, textResult, textCallForm,
		errTool, errArguments, errParcel, errCarrier, errCode, errShipped, errDock, errReceipt, errConfirmed, errTag, errNoCall,
	}
	for _, phrases := range textAsks {
		texts = append(texts, phrases...)
	}
	for _, tool := range toolList {
		texts = append(texts, tool.Function.Name, tool.Function.Description, string(tool.Function.Parameters), tool.Type)
	}
	words := regexp.MustCompile(`[A-Za-z]+`).FindAllString(strings.ReplaceAll(strings.Join(texts, "\n"), "%s", ""), -1)
	slices.Sort(words)
	return slices.Compact(words)
}
